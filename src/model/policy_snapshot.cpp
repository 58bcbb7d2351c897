#include "model/policy_snapshot.h"

#include <utility>

#include "leeway/error.h"

namespace leeway {

PolicySnapshot::PolicySnapshot(std::shared_ptr<const Parameters> host, PolicyVersion version)
    : config_(host->config()), version_(version), host_(std::move(host)) {}

PolicySnapshot::PolicySnapshot(Parameters host, PolicyVersion version)
    : PolicySnapshot(std::make_shared<const Parameters>(std::move(host)), version) {}

PolicySnapshot::PolicySnapshot(ModelConfig config, std::unique_ptr<const DeviceWeights> device,
                               PolicyVersion version)
    : config_(std::move(config)), version_(version), device_(std::move(device)) {
  LEEWAY_CHECK(device_ != nullptr, "weights are needed");
}

PolicySnapshot PolicySnapshot::view_of(const Parameters& host, PolicyVersion version) {
  const std::shared_ptr<const void> nothing;
  return {std::shared_ptr<const Parameters>(nothing, &host), version};  // owns nothing
}

std::shared_ptr<const Parameters> PolicySnapshot::shared_host() const {
  const std::lock_guard lock(mutex_);
  if (!host_) {
    auto host = std::make_shared<Parameters>(device_->make_host(config_));
    device_->copy_to(*host);
    host_ = std::move(host);
  }
  return host_;
}

bool PolicySnapshot::has_host() const {
  const std::lock_guard lock(mutex_);
  return host_ != nullptr;
}

uint32_t PolicySnapshot::checksum() const {
  const std::lock_guard lock(mutex_);
  if (!checksum_) checksum_ = host_ ? leeway::checksum(*host_) : device_->checksum();
  return *checksum_;
}

std::string PolicySnapshot::not_finite_text() const {
  return device_ ? device_->not_finite_text() : leeway::not_finite_text(*shared_host());
}

}  // namespace leeway
