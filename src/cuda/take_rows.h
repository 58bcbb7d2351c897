// Rows in another order, on a CUDA device. dtype.h says what holds for all such functions.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace leeway::cuda {

// to[i] = from[rows[i]], or zeros where rows[i] is negative. Rows have `bytes` bytes and lie
// from_stride and to_stride bytes apart; all three are multiples of 16, as are the addresses.
void take_rows(const void* from, int64_t from_stride, const int32_t* rows, int64_t count,
               int64_t bytes, void* to, int64_t to_stride, cudaStream_t stream);

}  // namespace leeway::cuda
