#include "cuda/adamw.h"
#include "cuda/device_math.cuh"

namespace leeway::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kEach = 4;                                   // numbers of a thread at a time
constexpr int64_t kPart = int64_t{kThreads} * kEach * 64;  // numbers of a sum of squares

__device__ inline float4 load_four(const float* from) {
  return *reinterpret_cast<const float4*>(from);
}

struct alignas(8) FourHalves {
  __nv_bfloat16 values[4];
};

__device__ inline float changed(const AdamWStep& step, float keep, float p, float g, float& m,
                                float& v) {
  g *= step.scale;
  m = step.beta1 * m + (1.0f - step.beta1) * g;
  v = step.beta2 * v + (1.0f - step.beta2) * g * g;
  return p * keep - step.step_size * m / (sqrtf(v) * step.root + step.epsilon);
}

__global__ void adamw_kernel(AdamWStep step) {
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kEach;
  if (i >= step.count) return;
  const float keep = i < step.decaying ? step.keep : 1.0f;
  auto* copy = static_cast<__nv_bfloat16*>(step.copy);
  if (i + kEach > step.count) {
    for (int64_t k = i; k < step.count; ++k) {
      step.parameters[k] = changed(step, keep, step.parameters[k], step.gradients[k],
                                   step.first_moment[k], step.second_moment[k]);
      if (copy != nullptr) copy[k] = narrow<__nv_bfloat16>(step.parameters[k]);
    }
    return;
  }
  float4 p = load_four(step.parameters + i), m = load_four(step.first_moment + i);
  float4 v = load_four(step.second_moment + i);
  const float4 g = load_four(step.gradients + i);
  p.x = changed(step, keep, p.x, g.x, m.x, v.x);
  p.y = changed(step, keep, p.y, g.y, m.y, v.y);
  p.z = changed(step, keep, p.z, g.z, m.z, v.z);
  p.w = changed(step, keep, p.w, g.w, m.w, v.w);
  *reinterpret_cast<float4*>(step.parameters + i) = p;
  *reinterpret_cast<float4*>(step.first_moment + i) = m;
  *reinterpret_cast<float4*>(step.second_moment + i) = v;
  if (copy == nullptr) return;
  FourHalves halves;
  halves.values[0] = narrow<__nv_bfloat16>(p.x), halves.values[1] = narrow<__nv_bfloat16>(p.y);
  halves.values[2] = narrow<__nv_bfloat16>(p.z), halves.values[3] = narrow<__nv_bfloat16>(p.w);
  *reinterpret_cast<uint2*>(copy + i) = *reinterpret_cast<const uint2*>(&halves);
}

// One block for kPart numbers.
__global__ void squares_kernel(const float* x, int64_t count, double* sums) {
  __shared__ double shared[kThreads];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kPart;
  const int64_t end = first + kPart < count ? first + kPart : count;
  double sum = 0.0;
  for (int64_t i = first + threadIdx.x * kEach; i < end; i += kThreads * kEach) {
    if (i + kEach > end) {
      for (int64_t k = i; k < end; ++k) sum += static_cast<double>(x[k]) * x[k];
      break;
    }
    const float4 four = load_four(x + i);
    sum += static_cast<double>(four.x) * four.x + static_cast<double>(four.y) * four.y;
    sum += static_cast<double>(four.z) * four.z + static_cast<double>(four.w) * four.w;
  }
  shared[threadIdx.x] = sum;
  for (unsigned half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) shared[threadIdx.x] += shared[threadIdx.x + half];
  }
  if (threadIdx.x == 0) sums[blockIdx.x] = shared[0];
}

}  // namespace

void adamw_step(const AdamWStep& step, cudaStream_t stream) {
  if (step.count == 0) return;
  adamw_kernel<<<blocks_for(step.count, kThreads * kEach), kThreads, 0, stream>>>(step);
  check_launch("adamw_step");
}

int64_t square_sums(int64_t count) { return (count + kPart - 1) / kPart; }

void sum_squares(const float* x, int64_t count, double* sums, cudaStream_t stream) {
  if (count == 0) return;
  squares_kernel<<<static_cast<unsigned>(square_sums(count)), kThreads, 0, stream>>>(x, count,
                                                                                     sums);
  check_launch("sum_squares");
}

}  // namespace leeway::cuda
