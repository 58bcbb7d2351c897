// RoPE's angles on a torch device: one table for the trainer's decoder and the sampler's, so that
// both turn queries and keys by the same bits.
#pragma once

#include <ATen/ATen.h>

#include "model/model_config.h"

namespace leeway {

// Of all positions that the model has; float32 [max_position_embeddings, head_dim / 2].
struct TorchRopeTable {
  TorchRopeTable() = default;
  TorchRopeTable(const ModelConfig& config, at::Device device);
  at::Tensor cosines, sines;
};

}  // namespace leeway
