// The low-rank updates of a layer's products, forward and backward. A row's result depends on that
// row alone, bit for bit, as that of the products does, so that sampling and training agree.
#pragma once

#include <ATen/ATen.h>

#include <utility>
#include <vector>

#include "torch/flat_layout.h"
#include "torch/sampling_operations.h"

namespace leeway {

// Updates of matrices that are stacked, in their order, each with its number of outputs.
struct StackedUpdates {
  const LoraTensors* lora = nullptr;
  int64_t outputs = 0;
};
using Updates = std::vector<StackedUpdates>;

// Of the products that a layer makes at once.
Updates qkv_updates(const ModelConfig& config, const LayerAdapter& adapter);
Updates gate_up_updates(const ModelConfig& config, const LayerAdapter& adapter);

// y [N, outputs] += (scale x a^T) b^T, stack by stack.
void add_low_rank(cuda::Products* products, const Updates& updates, double scale,
                  const at::Tensor& x, at::Tensor& y);

// From d_y: adds to d_x, and to the float32 gradients of a and b, which are in `gradients` beside
// the updates, or writes those with `are_new`.
void low_rank_backward(cuda::Products* products, const Updates& updates, const Updates& gradients,
                       double scale, const at::Tensor& x, const at::Tensor& d_y, bool are_new,
                       at::Tensor& d_x);

}  // namespace leeway
