// Causal attention in float32 over a paged KV cache on a CUDA device: each row sees positions 0 ..
// its own of its sequence. Decode and prefill rows are treated alike. (bf16: attention.h.)
//
// A thread block handles one row and the query heads of one key/value head (up to four; more are
// split among blocks), so that a key is read once for all of them. With few rows, a row's keys are
// split among several blocks, whose results a second kernel combines. The number of splits depends
// only on the number of rows, never on their lengths, so that a captured graph stays valid.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/kv_pages.h"

namespace leeway::cuda {

struct PagedAttention {
  HeadSizes sizes;
  RowPlaces places;
  const void* q = nullptr;  // float32 [rows, query_heads * head_dim], not scaled
  const void *keys = nullptr, *values = nullptr;
  void* out = nullptr;         // [rows, query_heads * head_dim]; zeros for padding rows
  float* workspace = nullptr;  // attention_workspace floats
};

// The number of float32 values that any number of rows may need.
int64_t attention_workspace(const HeadSizes& sizes);

// out = softmax(q keys / sqrt(head_dim)) values, with float32 sums. Keys beyond a row's own
// position are never read.
void paged_attention(const PagedAttention& attention, cudaStream_t stream);

}  // namespace leeway::cuda
