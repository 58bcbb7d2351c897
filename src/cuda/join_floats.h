// Float32 numbers of their two halves (split_float.h). dtype.h says what holds for all such
// functions.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace leeway::cuda {

// full [count]: of each bf16 number of `high` and what its bits lack.
void join_floats(const void* high, const int16_t* low, int64_t count, float* full,
                 cudaStream_t stream);

}  // namespace leeway::cuda
