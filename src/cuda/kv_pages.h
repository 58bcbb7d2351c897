// The KV cache on a CUDA device: pages of kBlockKeys positions (kernels/kv_block.h), and where the
// rows of a pass sit in it.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/dtype.h"
#include "kernels/kv_block.h"

namespace leeway::cuda {

// Where the rows of a pass sit and where their sequences' keys and values lie. Keys and values of a
// layer are pages [page, kBlockKeys, kv_heads, head_dim]; position p of row r's sequence is place
// p % kBlockKeys of page pages[starts[r] + p / kBlockKeys].
struct RowPlaces {
  int64_t rows = 0;
  const int32_t* positions = nullptr;  // [rows]; negative: a row that only fills the pass
  const int32_t* starts = nullptr;     // [rows]
  const int32_t* pages = nullptr;
};

struct HeadSizes {
  int64_t query_heads = 0, kv_heads = 0;  // the first a multiple of the second
  int64_t head_dim = 0;                   // a multiple of 8, at most kMostHeadDim
};
inline constexpr int64_t kMostHeadDim = 256;

// pages[i][to] = pages[i][from] for each of `count` pairs and each of `stores` arrays of pages that
// lie `store_bytes` apart. Pairs {from, to} lie side by side; no page is both from and to.
// page_bytes is a multiple of 16.
void copy_pages(void* pages, int64_t stores, int64_t store_bytes, int64_t page_bytes,
                const int32_t* pairs, int64_t count, cudaStream_t stream);

}  // namespace leeway::cuda
