// The policy's weights on a torch device, as a PolicySnapshot carries them from the trainer's
// backend to the engine's.
#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <string>

#include "model/policy_snapshot.h"
#include "torch/flat_layout.h"

namespace leeway {

class TorchDeviceWeights final : public DeviceWeights {
 public:
  // `weights` [layout.size] on their device, which nobody else changes. Any stream may read them
  // when this returns. A reader on another stream than the one that they were made on must have
  // waited for its reads before the snapshot is destroyed: torch then gives the memory to the next
  // allocation of the first stream. `base`: of an adapter.
  TorchDeviceWeights(FlatLayout layout, at::Tensor weights,
                     std::shared_ptr<const Parameters> base = nullptr);

  const FlatLayout& layout() const { return layout_; }
  const at::Tensor& flat() const { return flat_; }
  const std::shared_ptr<const Parameters>& base() const { return base_; }

  Parameters make_host(const ModelConfig& config) const override;
  void copy_to(Parameters& host) const override;
  std::string not_finite_text() const override;
  uint32_t checksum() const override;
  bool are_rounded() const override { return flat_.scalar_type() == at::kBFloat16; }

 private:
  FlatLayout layout_;
  at::Tensor flat_;
  std::shared_ptr<const Parameters> base_;
  bool known_finite_ = false;  // seen when this was made
};

}  // namespace leeway
