// The two types of numbers that the CUDA kernels work on.
//
// For all functions of this folder: pointers are to device memory, sizes are checked by the caller,
// work is queued on `stream` and nothing waits for it. A launch that fails throws Error. Sums are
// float32 in an order that the shapes alone decide, so that the same call gives the same bits.
#pragma once

#include <cstdint>

namespace leeway::cuda {

enum class Dtype { float32, bf16 };
inline int64_t bytes_of(Dtype dtype) { return dtype == Dtype::bf16 ? 2 : 4; }

}  // namespace leeway::cuda
