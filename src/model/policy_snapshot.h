// The policy's weights at one version: what a trainer gives after an update, and what an engine,
// an evaluation or a file takes.
//
// A trainer on the CPU puts a host copy in it. A trainer on another device puts in a copy that
// stays there: an engine of the same device takes that one directly, and a host copy is made only
// if somebody asks for it. Either way the snapshot does not change when training goes on.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "data/policy_version.h"
#include "model/parameters.h"

namespace leeway {

// Immutable weights in a device's memory. Each kind of device has a class derived from this one; an
// engine backend finds the class of its own device by dynamic_cast. The functions may be called
// from any thread.
class DeviceWeights {
 public:
  virtual ~DeviceWeights() = default;
  // Where `copy_to` puts them: all weights of a model, or an adapter over its base.
  virtual Parameters make_host(const ModelConfig& config) const { return Parameters(config); }
  // As float32 on the host, in what `make_host` gives. Throws Error.
  virtual void copy_to(Parameters& host) const = 0;
  // As not_finite_text in parameters.h, found on the device. Throws Error.
  virtual std::string not_finite_text() const = 0;
  // That of what copy_to gives, found on the device where that is possible. Throws Error.
  virtual uint32_t checksum() const = 0;
  // Whether the trainer has them with more digits: these are what passes compute with.
  virtual bool are_rounded() const { return false; }
};

// What a run wants of a trainer's snapshots on a device.
struct SnapshotUse {
  // They go to other processes, which take them in float32: they are never rounded.
  bool is_shared = false;
  // Bytes of the device that a copy in float32, which a run may keep, leaves free.
  int64_t keep_free = 0;
};

// All functions may be called from any thread.
class PolicySnapshot {
 public:
  PolicySnapshot(std::shared_ptr<const Parameters> host, PolicyVersion version);
  PolicySnapshot(Parameters host, PolicyVersion version);
  PolicySnapshot(ModelConfig config, std::unique_ptr<const DeviceWeights> device,
                 PolicyVersion version);
  // Does not copy or own: `host` must outlive the snapshot and must not change while it lives.
  static PolicySnapshot view_of(const Parameters& host, PolicyVersion version);

  const ModelConfig& config() const { return config_; }
  PolicyVersion version() const { return version_; }

  const DeviceWeights* device() const { return device_.get(); }  // null: on the host alone
  // Whether the trainer has the weights with more digits, for which a device that is nearly full
  // has no room: these are for sampling and for evaluations, not to go on from.
  bool is_rounded() const { return device_ && device_->are_rounded(); }

  // Copied from the device at the first call, which throws Error where that fails.
  const Parameters& host() const { return *shared_host(); }
  std::shared_ptr<const Parameters> shared_host() const;
  bool has_host() const;  // without a call of `host` having to copy

  // checksum(host()), computed at the first call; from the device's weights without a host copy
  // where there is none. Throws Error where that fails.
  uint32_t checksum() const;
  // "NAME holds nan at [3, 7]" of the first parameter that is not finite; empty: all are. Looks at
  // the device's weights where there are any.
  std::string not_finite_text() const;

 private:
  ModelConfig config_;
  PolicyVersion version_;
  std::unique_ptr<const DeviceWeights> device_;
  mutable std::mutex mutex_;  // of the two that follow
  mutable std::shared_ptr<const Parameters> host_;
  mutable std::optional<uint32_t> checksum_;
};

}  // namespace leeway
