// The steps of a layer between its products, with gradients by autograd: plain ATen, and on CUDA a
// kernel each way (cuda/norm_rope_swiglu.h) for float32 and bf16. Sums and turns are in float32
// (float64 for float64); what a step gives is rounded to its input's type.
#pragma once

#include <torch/types.h>

#include "torch/rope_table.h"

namespace leeway {

// x / sqrt(mean of x^2 + eps) * weight over the last dimension; weight is of x's type.
torch::Tensor rms_norm(const torch::Tensor& x, const torch::Tensor& weight, double eps);

// x [N, heads, head_dim] with the pairs (i, i + head_dim / 2) of each head turned by the angles of
// the row's position; positions int32 [N] on x's device.
torch::Tensor rope(const torch::Tensor& x, const torch::Tensor& positions,
                   const TorchRopeTable& table);

// silu(gate) * up.
torch::Tensor swiglu(const torch::Tensor& gate, const torch::Tensor& up);

// The first two in plain ATen, on any device; `back` turns by the negative angles.
torch::Tensor plain_rms_norm(const torch::Tensor& x, const torch::Tensor& weight, double eps);
torch::Tensor plain_rope(const torch::Tensor& x, const torch::Tensor& positions,
                         const torch::Tensor& cosines, const torch::Tensor& sines,
                         bool back = false);

}  // namespace leeway
