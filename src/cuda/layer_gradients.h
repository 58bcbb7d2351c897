// The gradients of what norm_rope_swiglu.h computes, on a CUDA device. dtype.h says what holds for
// all such functions; arrays are contiguous and 16-byte aligned, and widths are multiples of 8.
// Gradients of weights are float32 and added to; their sums over rows have a fixed order.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/norm_rope_swiglu.h"

namespace leeway::cuda {

inline constexpr int64_t kMostNormWidth = 8192;  // of a norm's row

// Floats that a sum over rows needs, for weights [width].
int64_t row_sum_workspace(int64_t width);

// From d_y, the gradient of y = rms_norm(x) * weight: d_x = add + that of x; d_weight += that of
// weight; and y again, unless it is null. All [rows, width]; add may be null, d_x may be add, and y
// may be d_y.
struct RmsNormBackward {
  int64_t rows = 0, width = 0;
  const void *x = nullptr, *weight = nullptr, *d_y = nullptr, *add = nullptr;
  float eps = 0.0f;
  void *d_x = nullptr, *y = nullptr;
  float* d_weight = nullptr;   // [width]; null: not wanted
  float* workspace = nullptr;  // [row_sum_workspace(width)]
};
void rms_norm_backward(Dtype dtype, const RmsNormBackward& norm, cudaStream_t stream);

// From the gradients of queries and keys as pack_heads gives them, and of values: d_qkv, as qkv.
// The norms' gradients [head_dim] are null where the model has none or they are not wanted.
struct HeadsBackward {
  PackedHeads forward;  // without q and k
  const void *d_q = nullptr, *d_k = nullptr, *d_v = nullptr;
  void* d_qkv = nullptr;
  float *d_query_norm = nullptr, *d_key_norm = nullptr;
  float* workspace = nullptr;  // [row_sum_workspace(2 * head_dim)]
};
void heads_backward(Dtype dtype, const HeadsBackward& heads, cudaStream_t stream);

// gate_up [rows, 2 width], d_s [rows, width]: d_gate_up as gate_up, and s = silu(gate) * up again.
// d_gate_up may be gate_up, and s may be d_s.
void swiglu_rows_backward(Dtype dtype, const void* gate_up, const void* d_s, int64_t rows,
                          int64_t width, void* d_gate_up, void* s, cudaStream_t stream);

// d_table[id] += the rows of d_x [rows, width] whose id it is. `sorted` [rows] are the ids in
// rising order, `order` [rows] the row of each; rows of one id are added in that order.
void embed_backward(Dtype dtype, const int32_t* sorted, const int64_t* order, const void* d_x,
                    int64_t rows, int64_t width, float* d_table, cudaStream_t stream);

}  // namespace leeway::cuda
