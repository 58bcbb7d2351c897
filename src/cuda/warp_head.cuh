// A head in the registers of a warp, for kernels that go over the heads of rows.
#pragma once

#include "cuda/norm_rope_swiglu.h"
#include "cuda/row_math.cuh"

namespace leeway::cuda {

// A lane has kTwos times two adjacent numbers of each half of the head, zeros beyond its end. Norm
// and turn are spelled in intrinsics, so that a head has the bits of store_heads in every kernel
// that this is a part of.
template <int kTwos>
struct WarpHead {
  float a[2 * kTwos], b[2 * kTwos];  // of the first half and of the second

  static __device__ __forceinline__ int place(int n) {
    return (static_cast<int>(threadIdx.x) % kWarp + n * kWarp) * 2;
  }

  // Halves that are arrays of their own.
  template <class T>
  __device__ __forceinline__ void load_halves(const T* first, const T* second, int half) {
#pragma unroll
    for (int n = 0; n < kTwos; ++n) {
      const int i = place(n);
      a[2 * n] = a[2 * n + 1] = b[2 * n] = b[2 * n + 1] = 0.0f;
      if (i >= half) continue;
      load<2>(first + i, a + 2 * n), load<2>(second + i, b + 2 * n);
    }
  }
  template <class T>
  __device__ __forceinline__ void load_head(const T* from, int half) {
    load_halves(from, from + half, half);
  }
  template <class T>
  __device__ __forceinline__ void store_head(T* to, int half) const {
#pragma unroll
    for (int n = 0; n < kTwos; ++n) {
      const int i = place(n);
      if (i >= half) continue;
      store<2>(a + 2 * n, to + i), store<2>(b + 2 * n, to + half + i);
    }
  }

  // The lane's share.
  __device__ __forceinline__ float squares() const {
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < kTwos; ++n) {
      for (const float value : {a[2 * n], a[2 * n + 1], b[2 * n], b[2 * n + 1]}) {
        sum = __fmaf_rn(value, value, sum);
      }
    }
    return sum;
  }
  // Rounds as a norm in T does.
  template <class T>
  __device__ __forceinline__ void norm_by(float inverse, const WarpHead& weights) {
    const auto scaled = [&](float value, float weight) {
      return rounded<T>(__fmul_rn(rounded<T>(__fmul_rn(value, inverse)), weight));
    };
#pragma unroll
    for (int k = 0; k < 2 * kTwos; ++k) {
      a[k] = scaled(a[k], weights.a[k]), b[k] = scaled(b[k], weights.b[k]);
    }
  }
  // Turns the pairs (i, i + half) by angles with cosines `a` and sines `b`.
  __device__ __forceinline__ void turn_by(const WarpHead& angles, float sign = 1.0f) {
#pragma unroll
    for (int k = 0; k < 2 * kTwos; ++k) turn(a[k], b[k], angles.a[k], sign * angles.b[k]);
  }
};

// The angles of a position, for turn_by.
template <int kTwos>
__device__ __forceinline__ WarpHead<kTwos> angles_at(const RopeAngles& angles, int64_t position,
                                                     int half) {
  WarpHead<kTwos> found;
  found.load_halves(angles.cosines + position * half, angles.sines + position * half, half);
  return found;
}

// Calls body(kTwos), a constant that is enough for head_dim.
template <class Body>
void with_twos(int64_t head_dim, Body&& body) {
  constexpr int kMost = kMostHeadDim / 4 / kWarp;
  if (head_dim <= kMostHeadDim / kMost) {
    body(std::integral_constant<int, 1>());
  } else {
    body(std::integral_constant<int, kMost>());
  }
}

}  // namespace leeway::cuda
