// Whether all numbers of an array are finite, in one read of it.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/dtype.h"

namespace leeway::cuda {

// *not_finite, on the device, becomes 1 if any of `count` numbers is infinite or NaN, else 0. The
// array is 16-byte aligned.
void find_not_finite(Dtype dtype, const void* from, int64_t count, int32_t* not_finite,
                     cudaStream_t stream);

}  // namespace leeway::cuda
