// The trainer's computations on a torch device where an adapter is trained: the base frozen in the
// compute type and shared with the sampler (shared_base.h), the adapter and its AdamW moments in
// float32, passes by the trunk.
#pragma once

#include <torch/types.h>

#include "trainer/backend.h"

namespace leeway {

// weights.policy is an adapter. Throws Error for sizes or a type that the device's kernels lack.
std::unique_ptr<TrainingBackend> make_torch_adapter_training(TrainingWeights weights,
                                                             const TrainerTable& table,
                                                             torch::Device device,
                                                             torch::ScalarType compute);

}  // namespace leeway
