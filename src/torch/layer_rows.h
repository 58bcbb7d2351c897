// The steps of a layer between its matrix products, with gradients by autograd: plain ATen, and on
// CUDA a kernel each way (cuda_rows.h) for float32 and bf16. Sums and rotations are in float32
// (float64 for float64); results are rounded to the type of the input.
#pragma once

#include <torch/types.h>

namespace leeway {

// x / sqrt(mean of x^2 + eps) * weight over the last dimension; weight is of x's type.
torch::Tensor rms_norm(const torch::Tensor& x, const torch::Tensor& weight, double eps);

// RoPE: x [N, heads, head_dim] with the pairs (i, i + head_dim / 2) of each head rotated by the
// row's angle. cosines, sines [N, 1, head_dim / 2] in float32 (float64), without gradient.
torch::Tensor turned(const torch::Tensor& x, const torch::Tensor& cosines,
                     const torch::Tensor& sines);

// SwiGLU: silu(gate) * up.
torch::Tensor gated(const torch::Tensor& gate, const torch::Tensor& up);

}  // namespace leeway
