// Rows of a decoder's layers, for kernels in both directions: loads, and the formulas.
#pragma once

#include <type_traits>

#include "cuda/device_math.cuh"

namespace leeway::cuda {

template <class T>
struct alignas(2 * sizeof(T)) Two {
  T first, second;
};
template <class T>
struct alignas(4 * sizeof(T)) Four {
  T values[4];
};

// kCount numbers side by side as float32; kCount is 8, 16-byte aligned, 4 or 2, aligned as they, or
// 1.
template <int kCount, class T>
__device__ inline void load(const T* from, float* to) {
  if constexpr (kCount == 8) {
    const Eight<T> loaded = load_eight(from);
#pragma unroll
    for (int i = 0; i < 8; ++i) to[i] = wide(loaded.values[i]);
  } else if constexpr (kCount == 4) {
    const Four<T> loaded = *reinterpret_cast<const Four<T>*>(from);
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = wide(loaded.values[i]);
  } else if constexpr (kCount == 2) {
    const Two<T> loaded = *reinterpret_cast<const Two<T>*>(from);
    to[0] = wide(loaded.first), to[1] = wide(loaded.second);
  } else {
    to[0] = wide(from[0]);
  }
}
template <int kCount, class T>
__device__ inline void store(const float* from, T* to) {
  if constexpr (kCount == 8) {
    Eight<T> stored;
#pragma unroll
    for (int i = 0; i < 8; ++i) stored.values[i] = narrow<T>(from[i]);
    const auto* source = reinterpret_cast<const uint4*>(&stored);
    auto* target = reinterpret_cast<uint4*>(to);
#pragma unroll
    for (unsigned i = 0; i < sizeof(stored) / sizeof(uint4); ++i) target[i] = source[i];
  } else if constexpr (kCount == 4) {
    Four<T> stored;
#pragma unroll
    for (int i = 0; i < 4; ++i) stored.values[i] = narrow<T>(from[i]);
    *reinterpret_cast<Four<T>*>(to) = stored;
  } else if constexpr (kCount == 2) {
    *reinterpret_cast<Two<T>*>(to) = {narrow<T>(from[0]), narrow<T>(from[1])};
  } else {
    to[0] = narrow<T>(from[0]);
  }
}

// kCount numbers as they lie in memory, for a thread that waits for many: bf16 numbers take half of
// the registers that floats would. kCount and alignment as in load, 8 or 4.
template <int kCount, class T>
struct Loaded {
  uint32_t words[kCount * sizeof(T) / sizeof(uint32_t)];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (uint32_t& word : words) word = 0;
  }
  __device__ __forceinline__ void load(const T* from) {
    if constexpr (sizeof(words) == sizeof(uint2)) {
      const uint2 two = *reinterpret_cast<const uint2*>(from);
      words[0] = two.x, words[1] = two.y;
    } else {
#pragma unroll
      for (unsigned i = 0; i < sizeof(words) / sizeof(uint4); ++i) {
        const uint4 four = reinterpret_cast<const uint4*>(from)[i];
        words[4 * i] = four.x, words[4 * i + 1] = four.y;
        words[4 * i + 2] = four.z, words[4 * i + 3] = four.w;
      }
    }
  }
  __device__ __forceinline__ float at(int k) const {
    if constexpr (sizeof(T) == sizeof(float)) return __uint_as_float(words[k]);
    const uint32_t word = words[k / 2];
    return __uint_as_float(k % 2 == 0 ? word << 16 : word & 0xffff0000u);
  }
  // Floats that were made of the numbers before are not kept beyond this, but made again.
  __device__ __forceinline__ void forget_floats() {
#pragma unroll
    for (uint32_t& word : words) asm volatile("" : "+r"(word));
  }
};

// Calls body(count) with the numbers that one thread takes at a time, a constant.
template <class Body>
void with_count(int64_t numbers, Body&& body) {
  if (numbers % 8 == 0) {
    body(std::integral_constant<int, 8>());
  } else {
    body(std::integral_constant<int, 1>());
  }
}

// ---------------------------------------------------------------------------------------------
// The three formulas

// A row's squares are summed in an order that its width alone decides: a thread takes its numbers
// as they lie, then lanes, then warps.
template <int kCount>
__device__ inline float add_squares(const float* values, float sum) {
#pragma unroll
  for (int k = 0; k < kCount; ++k) sum = fmaf(values[k], values[k], sum);
  return sum;
}
__device__ inline float inverse_norm(float squares, int64_t width, float eps) {
  return rsqrtf(squares / static_cast<float>(width) + eps);
}
template <class T>
__device__ inline float normed(float x, float inverse, float weight) {
  return rounded<T>(x * inverse) * weight;
}

__device__ inline void turn(float& a, float& b, float cosine, float sine) {
  const float first = a;
  a = fmaf(first, cosine, -b * sine);
  b = fmaf(b, cosine, first * sine);
}

template <class T>
__device__ inline float gated(float gate, float up) {
  return rounded<T>(gate / (1.0f + expf(-gate))) * up;
}

}  // namespace leeway::cuda
