// Numbers of either type to float32 and back.
#pragma once

#include <cuda_bf16.h>

namespace leeway::cuda {

// Spelled out: torch's build flags take the conversions by cast away.
__device__ __forceinline__ float number_of(float value) { return value; }
__device__ __forceinline__ float number_of(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ __forceinline__ void put(float* to, float value) { *to = value; }
__device__ __forceinline__ void put(__nv_bfloat16* to, float value) {
  *to = __float2bfloat16_rn(value);
}

}  // namespace leeway::cuda
