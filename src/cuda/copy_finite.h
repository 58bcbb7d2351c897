// A copy of an array that also says whether all of its numbers are finite, for the price of the
// copy.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/dtype.h"

namespace leeway::cuda {

// to[i] = from[i] for `count` numbers. *not_finite, on the device, becomes 1 if any of them is
// infinite or NaN, else 0. Arrays are 16-byte aligned and do not overlap.
void copy_finite(Dtype dtype, const void* from, int64_t count, void* to, int32_t* not_finite,
                 cudaStream_t stream);

}  // namespace leeway::cuda
