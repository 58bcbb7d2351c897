// A head of a row between the product that makes it and attention: normed, its pairs turned by the
// angles of the row's position, written as it is stored. Sums are spelled in intrinsics, so that a
// head has the same bits in every kernel that this is a part of.
#pragma once

#include "cuda/kv_pages.h"
#include "cuda/row_math.cuh"

namespace leeway::cuda {

// Two adjacent numbers.
template <class T>
__device__ inline float2 load_two(const T* from) {
  if constexpr (sizeof(T) == sizeof(float)) {
    return *reinterpret_cast<const float2*>(from);
  } else {
    return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(from));
  }
}
template <class T>
__device__ inline void store_two(float first, float second, T* to) {
  if constexpr (sizeof(T) == sizeof(float)) {
    *reinterpret_cast<float2*>(to) = make_float2(first, second);
  } else {
    *reinterpret_cast<__nv_bfloat162*>(to) = __floats2bfloat162_rn(first, second);
  }
}

// A head that a warp holds: a lane has two adjacent numbers of each half at a time. kMostDim: the
// most dimensions that a head can have.
template <int kMostDim = static_cast<int>(kMostHeadDim)>
struct HeldHead {
  static constexpr int kMost = (kMostDim / 4 + kWarp - 1) / kWarp;
  float2 a[kMost], b[kMost];

  // The lane's n-th place in either half.
  __device__ static __forceinline__ int place(int n) {
    return static_cast<int>(threadIdx.x) % kWarp * 2 + n * 2 * kWarp;
  }

  template <class T>
  __device__ __forceinline__ void load(const T* from, int half) {
#pragma unroll
    for (int n = 0; n < kMost; ++n) {
      const int i = place(n);
      a[n] = i < half ? load_two(from + i) : make_float2(0.0f, 0.0f);
      b[n] = i < half ? load_two(from + half + i) : make_float2(0.0f, 0.0f);
    }
  }

  template <class T>
  __device__ __forceinline__ void store(int half, T* to) const {
#pragma unroll
    for (int n = 0; n < kMost; ++n) {
      const int i = place(n);
      if (i >= half) continue;
      store_two(a[n].x, a[n].y, to + i);
      store_two(b[n].x, b[n].y, to + half + i);
    }
  }

  // `norm` may be null: nothing changes.
  template <class T>
  __device__ __forceinline__ void scale(const T* norm, float eps, int half) {
    if (norm == nullptr) return;
    float squares = 0.0f;
#pragma unroll
    for (int n = 0; n < kMost; ++n) {
      for (const float value : {a[n].x, a[n].y, b[n].x, b[n].y}) {
        squares = __fmaf_rn(value, value, squares);
      }
    }
    const float inverse = inverse_norm(warp_sum(squares), 2 * half, eps);
    const auto scaled = [&](float value, float weight) {
      return rounded<T>(__fmul_rn(rounded<T>(__fmul_rn(value, inverse)), weight));
    };
#pragma unroll
    for (int n = 0; n < kMost; ++n) {
      const int i = place(n);
      if (i >= half) continue;
      const float2 by_a = load_two(norm + i), by_b = load_two(norm + half + i);
      a[n] = make_float2(scaled(a[n].x, by_a.x), scaled(a[n].y, by_a.y));
      b[n] = make_float2(scaled(b[n].x, by_b.x), scaled(b[n].y, by_b.y));
    }
  }

  // Turns the pairs (i, i + half) by angles that lie in another one: cosines in a, sines in b.
  __device__ __forceinline__ void turn_by(const HeldHead& angles) {
#pragma unroll
    for (int n = 0; n < kMost; ++n) {
      turn(a[n].x, b[n].x, angles.a[n].x, angles.b[n].x);
      turn(a[n].y, b[n].y, angles.a[n].y, angles.b[n].y);
    }
  }
  __device__ __forceinline__ void load_angles(const float* cosines, const float* sines, int half) {
#pragma unroll
    for (int n = 0; n < kMost; ++n) {
      const int i = place(n);
      a[n] = i < half ? load_two(cosines + i) : make_float2(0.0f, 0.0f);
      b[n] = i < half ? load_two(sines + i) : make_float2(0.0f, 0.0f);
    }
  }
};

// One warp for a head: norm it, turn its pairs, write it.
template <int kMostDim = static_cast<int>(kMostHeadDim), class T>
__device__ __forceinline__ void store_head(const T* from, const T* norm, float eps,
                                           const float* cosines, const float* sines, int head_dim,
                                           T* to) {
  const int half = head_dim / 2;
  HeldHead<kMostDim> head, angles;
  head.load(from, half);
  angles.load_angles(cosines, sines, half);
  head.scale(norm, eps, half);
  head.turn_by(angles);
  head.store(half, to);
}

}  // namespace leeway::cuda
