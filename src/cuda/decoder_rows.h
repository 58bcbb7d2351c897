// What a decoder does to each row between its matrix products, on a CUDA device.
//
// Rounding matches that of the same steps as separate operators on tensors of the type: what those
// would store is rounded here too, so that sampling and training see the same network.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/number.h"

namespace leeway::cuda {

inline constexpr int64_t kPageKeys = 16;

// The positions of a pass's rows and the pages of their sequences' KV cache. A layer's keys and
// values are pages [page, kPageKeys, kv_heads, head_dim]; position p of row r's sequence is slot p
// % kPageKeys of page pages[starts[r] + p / kPageKeys].
struct RowPlaces {
  int64_t rows = 0;
  const int32_t* positions = nullptr;  // [rows]; negative: a padding row
  const int32_t* starts = nullptr;     // [rows]
  const int32_t* pages = nullptr;
};

struct HeadSizes {
  int64_t query_heads = 0, kv_heads = 0;  // the first a multiple of the second
  int64_t head_dim = 0;                   // a multiple of 8, at most kMostHeadDim
};
inline constexpr int64_t kMostHeadDim = 256;

// x[i] = table[ids[i]]. table [any, width], x [rows, width].
void embed_rows(Number number, const void* table, const int32_t* ids, int64_t rows, int64_t width,
                void* x, cudaStream_t stream);

// x += delta, unless delta is null; y = rms_norm(x) * weight. x, delta, y [rows, width].
void add_rms_norm(Number number, void* x, const void* delta, int64_t rows, int64_t width,
                  const void* weight, float eps, void* y, cudaStream_t stream);
// y[i] = rms_norm(x[chosen[i]] + delta[chosen[i]]) * weight; x stays. y [count, width].
void chosen_rms_norm(Number number, const void* x, const void* delta, const int32_t* chosen,
                     int64_t count, int64_t width, const void* weight, float eps, void* y,
                     cudaStream_t stream);

// From qkv [rows, (query_heads + 2 kv_heads) head_dim]: queries, normed and rotated, to q [rows,
// query_heads * head_dim]; keys, normed and rotated, and values to their pages. The norms' weights
// [head_dim] are both null if the model has none. cosines, sines [positions, head_dim / 2].
struct HeadStep {
  HeadSizes sizes;
  RowPlaces places;
  const void* qkv = nullptr;
  const void *query_norm = nullptr, *key_norm = nullptr;
  float eps = 0.0f;
  const float *cosines = nullptr, *sines = nullptr;
  void* q = nullptr;
  void *keys = nullptr, *values = nullptr;  // the layer's pages
};
void store_heads(Number number, const HeadStep& step, cudaStream_t stream);

// s = silu(gate) * up from gate_up [rows, 2 width] = [gate | up]; s [rows, width].
void gate_rows(Number number, const void* gate_up, int64_t rows, int64_t width, void* s,
               cudaStream_t stream);

// pages[i][to] = pages[i][from] for each of `count` pairs and each of `stores` arrays of pages that
// are `store_bytes` apart. Pairs {from, to} are adjacent; no page is both source and destination.
// page_bytes is a multiple of 16.
void copy_pages(void* pages, int64_t stores, int64_t store_bytes, int64_t page_bytes,
                const int32_t* pairs, int64_t count, cudaStream_t stream);

}  // namespace leeway::cuda
