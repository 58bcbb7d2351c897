// Where packed sequences lie, as cuDNN takes it.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace leeway::cuda {

// Arrays of a batch that is filled up to `count` sequences with empty ones behind the last.
struct RaggedOffsets {
  static constexpr int kKinds = 4;
  int64_t widths[kKinds] = {};  // numbers of a row
  int64_t* starts = nullptr;    // [kKinds, count + 1]: the first number of each sequence
  int32_t* lengths = nullptr;   // [count]
};

// The first row and the rows of each sequence, on the device.
struct RaggedSequences {
  const int32_t *first_rows = nullptr, *lengths = nullptr;  // [count]
  int64_t count = 0, rows = 0;                              // of all sequences
};
void make_ragged_offsets(const RaggedSequences& sequences, int64_t count, const RaggedOffsets& to,
                         cudaStream_t stream);

}  // namespace leeway::cuda
