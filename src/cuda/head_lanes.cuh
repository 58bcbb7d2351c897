// Heads of rows in the registers of a warp, several side by side: adjacent lanes have one, and each
// of them adjacent numbers of either half of it.
#pragma once

#include "cuda/norm_rope_swiglu.h"
#include "cuda/row_math.cuh"

namespace leeway::cuda {

// How heads of head_dim lie in a warp whose lanes have kCount numbers of each half.
struct HeadLanes {
  int lanes;  // of a head, a power of two
  int heads;  // of a warp
};
template <int kCount>
HeadLanes head_lanes(int64_t head_dim) {
  HeadLanes found{1, kWarp};
  while (found.lanes * kCount < head_dim / 2) found.lanes *= 2, found.heads /= 2;
  return found;
}

// What a lane loads of a head, of either half.
template <int kCount, class T>
struct LoadedHeadPart {
  Loaded<kCount, T> a, b;

  __device__ __forceinline__ void load_halves(const T* first, const T* second) {
    a.load(first), b.load(second);
  }
  __device__ __forceinline__ void forget_floats() { a.forget_floats(), b.forget_floats(); }
};

// What a lane has of a head: zeros where there is none.
template <int kCount>
struct HeadPart {
  float a[kCount] = {}, b[kCount] = {};  // of the first half and of the second

  template <class T>
  __device__ __forceinline__ void load_halves(const T* first, const T* second) {
    load<kCount>(first, a), load<kCount>(second, b);
  }
  template <class T>
  __device__ __forceinline__ void take(const LoadedHeadPart<kCount, T>& loaded) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) a[k] = loaded.a.at(k), b[k] = loaded.b.at(k);
  }
  template <class T>
  __device__ __forceinline__ void store_halves(T* first, T* second) const {
    store<kCount>(a, first), store<kCount>(b, second);
  }
};

// The sum over the lanes of a head, in each of them.
__device__ __forceinline__ float lanes_sum(float x, int lanes) {
  for (int step = lanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}

}  // namespace leeway::cuda
