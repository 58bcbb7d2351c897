// The policy's weights between processes that share a GPU, by CUDA's handles for memory: without
// the host and without files.
#pragma once

#include <torch/types.h>

#include <cstdint>

#include "model/shared_weights.h"
#include "torch/flat_layout.h"

namespace leeway {

// A checksum of what lies where: two models with the same one can copy each other's memory.
uint32_t layout_sum(const FlatLayout& layout);

// For snapshots that TorchDeviceWeights carries. Throws Error if the build or the machine has no
// such device.
WeightSharing cuda_weight_sharing(torch::Device device);

}  // namespace leeway
