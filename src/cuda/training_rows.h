// Row-wise operations of a training pass on a CUDA device besides products and attention, forward
// and backward. cuda/number.h states what holds for all such functions; arrays are contiguous and
// 16-byte aligned. Values are rounded where the same steps as separate operators would store them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/number.h"

namespace leeway::cuda {

// y = x * inverse * weight, inverse [rows] = 1 / sqrt(mean of x^2 + eps). x, y [rows, width].
void norm_rows(Number number, const void* x, int64_t rows, int64_t width, const void* weight,
               float eps, void* y, float* inverse, cudaStream_t stream);

// y = x with the pairs (i, i + head_dim / 2) of every head rotated by the row's angles (RoPE), or
// back with `back`. x, y [rows, heads, head_dim]; cosines, sines [rows, head_dim / 2].
void turn_rows(Number number, const void* x, int64_t rows, int64_t heads, int64_t head_dim,
               const float* cosines, const float* sines, bool back, void* y, cudaStream_t stream);

// s = silu(gate) * up, and from d_s the gradients of both. All [count].
void gate_forward(Number number, const void* gate, const void* up, int64_t count, void* s,
                  cudaStream_t stream);
void gate_backward(Number number, const void* gate, const void* up, const void* d_s, int64_t count,
                   void* d_gate, void* d_up, cudaStream_t stream);

}  // namespace leeway::cuda
