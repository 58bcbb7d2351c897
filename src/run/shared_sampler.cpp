#include "run/shared_sampler.h"

#include <algorithm>
#include <utility>

namespace leeway {

SharedSampler::SharedSampler(Sampler& sampler, PolicyVersion version, Clock& clock)
    : sampler_(sampler), version_(version), clock_(clock), training_(*this), evaluation_(*this) {}

void SharedSampler::collect(double seconds) {
  for (SampledSequence& result : sampler_.poll(seconds)) {
    // A result of neither is of a request that was cancelled.
    static_cast<void>(training_.keep(result) || evaluation_.keep(result));
  }
}

int64_t SharedSampler::User::submit(Request request) {
  const int64_t samples = request.samples;
  const int64_t number = shared_.sampler_.submit(std::move(request));
  open_[number] = samples;
  return number;
}

void SharedSampler::User::cancel(int64_t request) {
  open_.erase(request);
  std::erase_if(results_, [&](const SampledSequence& result) { return result.request == request; });
  shared_.sampler_.cancel(request);
}

bool SharedSampler::User::keep(SampledSequence& result) {
  const auto found = open_.find(result.request);
  if (found == open_.end()) return false;
  if (--found->second == 0) open_.erase(found);
  results_.push_back(std::move(result));
  return true;
}

std::vector<SampledSequence> SharedSampler::User::poll(double seconds) {
  const double end = shared_.clock_.now() + seconds;
  double left = results_.empty() && !open_.empty() ? seconds : 0.0;
  do {
    shared_.collect(left);
    left = end - shared_.clock_.now();
  } while (results_.empty() && !open_.empty() && left > 0.0);
  return std::exchange(results_, {});
}

void SharedSampler::User::update_weights(std::shared_ptr<const PolicySnapshot> weights,
                                         PolicyVersion version) {
  shared_.sampler_.update_weights(std::move(weights), version);
  shared_.version_ = version;
}

}  // namespace leeway
