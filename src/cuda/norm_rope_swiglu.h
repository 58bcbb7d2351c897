// What a decoder does to each row between its matrix products and attention, on a CUDA device:
// embedding, RMSNorm, RoPE and SwiGLU, for training and for sampling alike. dtype.h says what holds
// for all such functions; arrays are contiguous and 16-byte aligned.
//
// Values are rounded where the same steps as separate operators on tensors of the type would store
// them, so that sampling and training see the same network.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/dtype.h"
#include "cuda/kv_pages.h"

namespace leeway::cuda {

// x[i] = table[ids[i]]. table [any, width], x [rows, width].
void embed_rows(Dtype dtype, const void* table, const int32_t* ids, int64_t rows, int64_t width,
                void* x, cudaStream_t stream);

// y = (x + delta) * inverse * weight, inverse = 1 / sqrt(mean of (x + delta)^2 + eps), by row. The
// order of a row's sum follows from its width alone, so that a row has the same bits in training
// and in sampling.
struct RmsNorm {
  int64_t rows = 0, width = 0;
  const void* x = nullptr;          // [rows, width]; with `chosen` [any, width]
  const void* delta = nullptr;      // like x; null: nothing is added
  const int32_t* chosen = nullptr;  // [rows], the rows of x and delta; null: 0, 1, ..
  void* sum = nullptr;              // receives x + delta; may be x, not with `chosen`; may be null
  const void* weight = nullptr;     // [width]
  float eps = 0.0f;
  void* y = nullptr;         // [rows, width]
  float* inverse = nullptr;  // [rows]; may be null
};
void rms_norm(Dtype dtype, const RmsNorm& norm, cudaStream_t stream);

// Cosines and sines of the angles of positions 0, 1, ..; both [positions, head_dim / 2].
struct RopeAngles {
  const float *cosines = nullptr, *sines = nullptr;
};

// y = x with the pairs (i, i + head_dim / 2) of every head turned by the angles of the row's
// position, or `back` by their negatives. x, y [rows, heads, head_dim]; positions [rows].
void rope(Dtype dtype, const void* x, int64_t rows, int64_t heads, int64_t head_dim,
          const int32_t* positions, const RopeAngles& angles, bool back, void* y,
          cudaStream_t stream);

// From qkv [rows, (query_heads + 2 kv_heads) head_dim]: queries, normed and turned, to q [rows,
// query_heads * head_dim]; keys, normed and turned, and values to their pages. The norms' weights
// [head_dim] are both null where the model has none. The numbers are those of rms_norm and rope.
struct HeadStep {
  HeadSizes sizes;
  RowPlaces places;
  const void* qkv = nullptr;
  const void *query_norm = nullptr, *key_norm = nullptr;
  float eps = 0.0f;
  RopeAngles angles;
  void* q = nullptr;
  void *keys = nullptr, *values = nullptr;  // the layer's pages
};
void store_heads(Dtype dtype, const HeadStep& step, cudaStream_t stream);

// The same queries and keys, side by side: k [rows, kv_heads * head_dim].
struct PackedHeads {
  HeadSizes sizes;
  int64_t rows = 0;
  const int32_t* positions = nullptr;  // [rows]
  const void* qkv = nullptr;
  const void *query_norm = nullptr, *key_norm = nullptr;
  float eps = 0.0f;
  RopeAngles angles;
  void *q = nullptr, *k = nullptr;
};
void pack_heads(Dtype dtype, const PackedHeads& step, cudaStream_t stream);

// s = silu(gate) * up, and from d_s the gradients of both. Rows of gate and up are `stride` numbers
// apart (width where they are arrays of their own, 2 width where they lie side by side); s and the
// gradients are [rows, width].
void swiglu(Dtype dtype, const void* gate, const void* up, int64_t stride, int64_t rows,
            int64_t width, void* s, cudaStream_t stream);
void swiglu_backward(Dtype dtype, const void* gate, const void* up, const void* d_s, int64_t count,
                     void* d_gate, void* d_up, cudaStream_t stream);

}  // namespace leeway::cuda
