// The steps of a layer between its products, with gradients by autograd: plain ATen, and on CUDA a
// kernel each way (cuda_rows.h) for float32 and bf16. Sums and turns are in float32 (float64 for
// float64); what a step gives is rounded to its input's type.
#pragma once

#include <torch/types.h>

namespace leeway {

// x / sqrt(mean of x^2 + eps) * weight over the last dimension; weight is of x's type.
torch::Tensor rms_norm(const torch::Tensor& x, const torch::Tensor& weight, double eps);

// x [N, heads, head_dim] with the pairs (i, i + head_dim / 2) of each head turned by the row's
// angle. cosines, sines [N, 1, head_dim / 2] in float32 (float64), without gradient.
torch::Tensor turned(const torch::Tensor& x, const torch::Tensor& cosines,
                     const torch::Tensor& sines);

// silu(gate) * up.
torch::Tensor gated(const torch::Tensor& gate, const torch::Tensor& up);

}  // namespace leeway
