// Where sequences begin, as cuDNN takes it.
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

// From offsets [sequences + 1], sequences <= count.
void make_ragged_offsets(const int32_t* offsets, int64_t sequences, int64_t count,
                         const RaggedOffsets& to, cudaStream_t stream);

}  // namespace leeway::cuda
