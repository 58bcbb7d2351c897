// The policy's weights on a torch device, as a PolicySnapshot carries them from the trainer's
// backend to the engine's.
#pragma once

#include <ATen/ATen.h>

#include <vector>

#include "model/policy_snapshot.h"

namespace leeway {

class TorchDeviceWeights final : public DeviceWeights {
 public:
  // Copies `parameters`, which are aligned with `table`, on their device. Any stream may read the
  // copy when this returns; who reads on another stream than the default one waits for that before
  // the snapshot goes, since torch gives the memory to somebody else then.
  TorchDeviceWeights(std::vector<ParameterInfo> table, const std::vector<at::Tensor>& parameters);

  const std::vector<ParameterInfo>& table() const { return table_; }
  const std::vector<at::Tensor>& tensors() const { return tensors_; }  // beside `table`

  void copy_to(Parameters& host) const override;
  std::string not_finite_text() const override;

 private:
  std::vector<ParameterInfo> table_;
  std::vector<at::Tensor> tensors_;
};

}  // namespace leeway
