// What a low-rank adapter adds to the result of a product, on a CUDA device in bf16: y += scale low
// b^T, where low = x a^T has been computed before. A row's bits do not depend on the rows beside
// it: the sum over the rank has one order, in float32, and is rounded once, with y.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace leeway::cuda {

// Matrices whose results are columns of the same y, with their own columns of low: those of part i
// begin at i * rank.
inline constexpr int kMostLowRankParts = 3;
struct LowRankPart {
  int64_t first = 0, outputs = 0;  // columns of y; multiples of 8
  const void* b = nullptr;         // [outputs, rank]
};

struct LowRankUpdate {
  int64_t rows = 0, rank = 0;  // the rank is a multiple of 8
  float scale = 1.0f;
  int parts = 0;
  LowRankPart part[kMostLowRankParts];
  const void* low = nullptr;  // [rows, parts * rank]
  void* y = nullptr;          // [rows, any]; 16-byte aligned
  int64_t y_stride = 0;       // numbers from row to row, a multiple of 8
};
void add_low_rank(const LowRankUpdate& update, cudaStream_t stream);

}  // namespace leeway::cuda
