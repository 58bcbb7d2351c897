// Shared by the kernels: numbers of either type as float32, sums over warps and blocks.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/device.h"
#include "cuda/dtype.h"

namespace leeway::cuda {

inline constexpr int kWarp = 32;
inline constexpr unsigned kAllLanes = 0xffffffffu;
inline constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

// Conversions are spelled out: torch's build flags take those by cast away.
__device__ inline float wide(float x) { return x; }
__device__ inline float wide(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T>
__device__ inline T narrow(float x) {
  if constexpr (sizeof(T) == sizeof(float)) {
    return x;
  } else {
    return __float2bfloat16(x);
  }
}
// Rounds as if stored and read again.
template <class T>
__device__ inline float rounded(float x) {
  return wide(narrow<T>(x));
}

// Eight adjacent numbers, 16-byte aligned.
template <class T>
struct alignas(16) Eight {
  T values[8];
};
template <class T>
__device__ inline Eight<T> load_eight(const T* from) {
  Eight<T> result;
  const auto* source = reinterpret_cast<const uint4*>(from);
  auto* target = reinterpret_cast<uint4*>(&result);
#pragma unroll
  for (unsigned i = 0; i < sizeof(Eight<T>) / sizeof(uint4); ++i) target[i] = source[i];
  return result;
}
template <class T>
__device__ inline Eight<T> eight_zeros() {
  Eight<T> result;
  auto* target = reinterpret_cast<uint4*>(&result);
#pragma unroll
  for (unsigned i = 0; i < sizeof(Eight<T>) / sizeof(uint4); ++i)
    target[i] = make_uint4(0, 0, 0, 0);
  return result;
}

// The sum, in every lane.
__device__ inline float warp_sum(float x) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}

// The sum, in every thread of a block of kThreads. `scratch` is shared memory of kThreads / kWarp
// floats; a block that calls this twice must synchronize in between.
template <int kThreads>
__device__ inline float block_sum(float x, float* scratch) {
  constexpr int kWarps = kThreads / kWarp;
  x = warp_sum(x);
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = x;
  __syncthreads();
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) sum += scratch[i];
  return sum;
}

// Calls `body` with a value of the type.
template <class Body>
void with_type(Dtype dtype, Body&& body) {
  if (dtype == Dtype::bf16) {
    body(__nv_bfloat16{});
  } else {
    body(float{});
  }
}

inline unsigned blocks_for(int64_t items, int64_t per_block) {
  return static_cast<unsigned>((items + per_block - 1) / per_block);
}

}  // namespace leeway::cuda
