// The threads of one block as the team of sequence_math.h. Sums have a fixed order: lanes by
// halving, then warps one after the other.
#pragma once

#include <cstdint>

namespace leeway::cuda {

template <class T, class Join>
__device__ T join_lanes(T value, Join join) {
  for (int offset = 16; offset > 0; offset /= 2) {
    value = join(value, __shfl_down_sync(0xffffffffu, value, offset));
  }
  return value;
}

struct Add {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return a + b;
  }
};
struct Larger {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return a > b ? a : b;
  }
};
struct Smaller {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return a < b ? a : b;
  }
};

template <int kThreads>
class Team {
 public:
  __device__ explicit Team(double* shared) : shared_(shared) {}  // [kThreads / 32]
  __device__ int thread() const { return static_cast<int>(threadIdx.x); }
  __device__ int threads() const { return kThreads; }
  __device__ void sync() const { __syncthreads(); }
  __device__ double sum(double value) { return join(value, Add()); }
  __device__ float max(float value) {
    return static_cast<float>(join(static_cast<double>(value), Larger()));
  }
  __device__ float min(float value) {
    return static_cast<float>(join(static_cast<double>(value), Smaller()));
  }

 private:
  template <class Join>
  __device__ double join(double value, Join op) {
    value = join_lanes(value, op);
    if (threadIdx.x % 32 == 0) shared_[threadIdx.x / 32] = value;
    __syncthreads();
    double total = shared_[0];
    for (int w = 1; w < kThreads / 32; ++w) total = op(total, shared_[w]);
    __syncthreads();
    return total;
  }

  double* shared_;
};

}  // namespace leeway::cuda
