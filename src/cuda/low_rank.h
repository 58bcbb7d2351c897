// What a low-rank adapter adds to the result of a product, on a CUDA device in bf16: y += scale low
// b^T with low = x a^T. A row's bits do not depend on the rows beside it: sums have one order, in
// float32; low is rounded once, and the other once, with y.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace leeway::cuda {

struct LowRankInputs {
  int64_t rows = 0, inputs = 0, width = 0;  // inputs and width are multiples of 8
  const void* x = nullptr;                  // [rows, inputs]; 16-byte aligned
  int64_t x_stride = 0;                     // numbers from row to row, a multiple of 8
  const void* a = nullptr;                  // [width, inputs]; 16-byte aligned
  void* low = nullptr;                      // [rows, width]
};
void low_rank_inputs(const LowRankInputs& inputs, cudaStream_t stream);

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
