// How a sum of products of codes becomes a number: the same operations in every kernel that makes
// one, none of which the compiler may join.
#pragma once

#include "cuda/device_math.cuh"

namespace leeway::cuda {

__device__ __forceinline__ float scaled_product(float sum, float row_scale, float output_scale) {
  return __fmul_rn(__fmul_rn(sum, row_scale), output_scale);
}
__device__ __forceinline__ float with_bias(float product, const __nv_bfloat16* bias,
                                           int64_t output) {
  return bias == nullptr ? product : __fadd_rn(product, wide(bias[output]));
}

}  // namespace leeway::cuda
