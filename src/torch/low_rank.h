// The low-rank updates of a layer's products, forward and backward. Forward a row's result depends
// on that row alone, bit for bit, as that of the products does, so that sampling and training
// agree.
#pragma once

#include <ATen/ATen.h>

#include "torch/flat_layout.h"
#include "torch/sampling_operations.h"

namespace leeway {

// Products of the rank have one order of sums on CUDA if it is a multiple of 8. Throws Error.
void check_rank(int64_t rank, at::Device device);

// y [N, outputs] += scale (x a^T) b^T, part by part; nothing where the stack is empty. `low` is a
// place for x a^T, [N, parts * rank].
void add_low_rank(cuda::Products* products, const LowRankStack& stack, double scale,
                  const at::Tensor& x, at::Tensor& low, at::Tensor& y);
// With a place of its own.
void add_low_rank(cuda::Products* products, const LowRankStack& stack, double scale,
                  const at::Tensor& x, at::Tensor& y);

// From the gradient d_y: adds that of x to d_x and returns that of x a^T, for the other function;
// undefined where the stack is empty.
at::Tensor low_rank_backward(const LowRankStack& stack, double scale, const at::Tensor& d_y,
                             at::Tensor& d_x);
// Adds to the float32 gradients of a and b, or writes them with `are_new`.
void low_rank_gradients(cuda::Products* products, const LowRankStack& stack, double scale,
                        const at::Tensor& x, const at::Tensor& d_y, const at::Tensor& d_low,
                        const LowRankStack& gradients, bool are_new);

}  // namespace leeway
