#include "cuda/adamw.h"
#include "cuda/device_math.cuh"
#include "cuda/split_float.h"

namespace leeway::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kEach = 4;                                   // numbers of a thread at a time
constexpr int64_t kPart = int64_t{kThreads} * kEach * 64;  // numbers of a sum of squares

__device__ inline float4 load_four(const float* from) {
  return *reinterpret_cast<const float4*>(from);
}

__device__ inline float changed(const AdamWStep& step, float keep, float p, float g, float& m,
                                float& v) {
  g *= step.scale;
  m = step.beta1 * m + (1.0f - step.beta1) * g;
  v = step.beta2 * v + (1.0f - step.beta2) * g * g;
  return p * keep - step.step_size * m / (sqrtf(v) * step.root + step.epsilon);
}

// `Count` adjacent parameters from number i on, of which there are `here`.
template <int Count>
__device__ inline void load_parameters(const AdamWStep& step, int64_t i, int64_t here, float* p) {
  const bool whole = here == Count;
  if (step.low == nullptr) {
    if (whole) {
      const auto* from = reinterpret_cast<const float4*>(step.parameters + i);
#pragma unroll
      for (int k = 0; k < Count / 4; ++k) reinterpret_cast<float4*>(p)[k] = from[k];
      return;
    }
#pragma unroll
    for (int k = 0; k < Count; ++k) p[k] = k < here ? step.parameters[i + k] : 0.0f;
    return;
  }
  alignas(16) uint16_t high[Count];
  alignas(16) int16_t low[Count];
  const auto* copy = static_cast<const uint16_t*>(step.copy);
#pragma unroll
  for (int k = 0; k < Count / 4; ++k) {
    if (!whole) break;
    reinterpret_cast<uint2*>(high)[k] = reinterpret_cast<const uint2*>(copy + i)[k];
    reinterpret_cast<uint2*>(low)[k] = reinterpret_cast<const uint2*>(step.low + i)[k];
  }
#pragma unroll
  for (int k = 0; k < Count; ++k) {
    if (!whole) high[k] = k < here ? copy[i + k] : 0, low[k] = k < here ? step.low[i + k] : 0;
    p[k] = __uint_as_float(joined_bits({high[k], low[k]}));
  }
}

template <int Count>
__device__ inline void store_parameters(const AdamWStep& step, int64_t i, int64_t here,
                                        const float* p) {
  const bool whole = here == Count;
  if (step.low == nullptr) {
    if (whole) {
      auto* to = reinterpret_cast<float4*>(step.parameters + i);
#pragma unroll
      for (int k = 0; k < Count / 4; ++k) to[k] = reinterpret_cast<const float4*>(p)[k];
    } else {
#pragma unroll
      for (int k = 0; k < Count; ++k) {
        if (k < here) step.parameters[i + k] = p[k];
      }
    }
  }
  if (step.copy == nullptr) return;
  alignas(16) uint16_t high[Count];
  alignas(16) int16_t low[Count];
#pragma unroll
  for (int k = 0; k < Count; ++k) {
    const SplitFloat parts = split_bits(__float_as_uint(p[k]));
    high[k] = parts.high, low[k] = parts.low;
  }
  auto* copy = static_cast<uint16_t*>(step.copy);
  if (whole) {
#pragma unroll
    for (int k = 0; k < Count / 4; ++k) {
      reinterpret_cast<uint2*>(copy + i)[k] = reinterpret_cast<const uint2*>(high)[k];
      if (step.low == nullptr) continue;
      reinterpret_cast<uint2*>(step.low + i)[k] = reinterpret_cast<const uint2*>(low)[k];
    }
    return;
  }
#pragma unroll
  for (int k = 0; k < Count; ++k) {
    if (k < here) copy[i + k] = high[k];
    if (k < here && step.low != nullptr) step.low[i + k] = low[k];
  }
}

__global__ void adamw_kernel(AdamWStep step) {
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kEach;
  if (i >= step.count) return;
  const float keep = i < step.decaying ? step.keep : 1.0f;
  const int64_t here = step.count - i < kEach ? step.count - i : kEach;
  alignas(16) float p[kEach];
  load_parameters<kEach>(step, i, here, p);
  if (here < kEach) {
    for (int k = 0; k < here; ++k) {
      p[k] = changed(step, keep, p[k], step.gradients[i + k], step.first_moment[i + k],
                     step.second_moment[i + k]);
    }
  } else {
    float4 m = load_four(step.first_moment + i), v = load_four(step.second_moment + i);
    const float4 g = load_four(step.gradients + i);
    p[0] = changed(step, keep, p[0], g.x, m.x, v.x);
    p[1] = changed(step, keep, p[1], g.y, m.y, v.y);
    p[2] = changed(step, keep, p[2], g.z, m.z, v.z);
    p[3] = changed(step, keep, p[3], g.w, m.w, v.w);
    *reinterpret_cast<float4*>(step.first_moment + i) = m;
    *reinterpret_cast<float4*>(step.second_moment + i) = v;
  }
  store_parameters<kEach>(step, i, here, p);
}

// ---------------------------------------------------------------------------------------------
// Moments as codes: a warp for each block of them, eight numbers a lane.

static_assert(kMomentBlock == 8 * kWarp, "eight numbers a lane");

__device__ inline float warp_max(float x) {
#pragma unroll
  for (int apart = kWarp / 2; apart > 0; apart /= 2) {
    x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, apart));
  }
  return x;
}

struct EightMoments {
  float first[8], second[8];
};

struct alignas(8) EightCodes {
  uint8_t values[8];
};

// Calls each(k) for the lane's numbers that there are.
template <class Each>
__device__ inline void for_eight(int64_t here, Each&& each) {
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    if (k < here) each(k);
  }
}

// `i` is the lane's first number, `here` how many of eight there are. Arrays have a multiple of
// eight numbers, or end within the lane's.
__device__ inline void load_moments(const CodedMoments& from, int64_t i, int64_t here,
                                    EightMoments& moments) {
  const float first_scale = from.first_scales[i / kMomentBlock];
  const float second_scale = from.second_scales[i / kMomentBlock];
  EightCodes first = {}, second = {};
  if (here == 8) {
    *reinterpret_cast<uint2*>(&first) = *reinterpret_cast<const uint2*>(from.first_codes + i);
    *reinterpret_cast<uint2*>(&second) = *reinterpret_cast<const uint2*>(from.second_codes + i);
  } else {
    for_eight(here, [&](int k) {
      first.values[k] = static_cast<uint8_t>(from.first_codes[i + k]);
      second.values[k] = from.second_codes[i + k];
    });
  }
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    moments.first[k] = first_moment_of(static_cast<int8_t>(first.values[k]), first_scale);
    moments.second[k] = second_moment_of(second.values[k], second_scale);
  }
}

// All lanes of a warp call it; numbers that are not there are zero.
__device__ inline void store_moments(const EightMoments& moments, int64_t i, int64_t here,
                                     const CodedMoments& to) {
  float first_largest = 0.0f, second_largest = 0.0f;
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    first_largest = fmaxf(first_largest, fabsf(moments.first[k]));
    second_largest = fmaxf(second_largest, moments.second[k]);
  }
  const float first_scale = first_moment_scale(warp_max(first_largest));
  const float second_scale = second_moment_scale(warp_max(second_largest));
  if (threadIdx.x % kWarp == 0) {
    to.first_scales[i / kMomentBlock] = first_scale;
    to.second_scales[i / kMomentBlock] = second_scale;
  }
  EightCodes first, second;
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    first.values[k] = static_cast<uint8_t>(first_moment_code(moments.first[k], first_scale));
    second.values[k] = second_moment_code(moments.second[k], second_scale);
  }
  if (here == 8) {
    *reinterpret_cast<uint2*>(to.first_codes + i) = *reinterpret_cast<const uint2*>(&first);
    *reinterpret_cast<uint2*>(to.second_codes + i) = *reinterpret_cast<const uint2*>(&second);
    return;
  }
  for_eight(here, [&](int k) {
    to.first_codes[i + k] = static_cast<int8_t>(first.values[k]);
    to.second_codes[i + k] = second.values[k];
  });
}

// The lane's first number, and how many of eight there are; whole warps beyond the end leave.
__device__ inline bool lane_of(int64_t count, int64_t& i, int64_t& here) {
  i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * 8;
  here = count - i < 0 ? 0 : count - i < 8 ? count - i : 8;
  return i / kMomentBlock * kMomentBlock < count;
}

__global__ void __launch_bounds__(kThreads)
    coded_adamw_kernel(const AdamWStep step, const CodedMoments coded) {
  int64_t i = 0, here = 0;
  if (!lane_of(step.count, i, here)) return;
  const float keep = i < step.decaying ? step.keep : 1.0f;
  EightMoments moments;
  load_moments(coded, i, here, moments);
  alignas(16) float p[8];
  load_parameters<8>(step, i, here, p);
  Eight<float> g = {};
  if (here == 8) {
    g = load_eight(step.gradients + i);
  } else {
    for_eight(here, [&](int k) { g.values[k] = step.gradients[i + k]; });
  }
  // What is not there stays zero.
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    p[k] = changed(step, keep, p[k], g.values[k], moments.first[k], moments.second[k]);
  }
  store_parameters<8>(step, i, here, p);
  store_moments(moments, i, here, coded);
}

__global__ void __launch_bounds__(kThreads)
    encode_kernel(const float* first, const float* second, int64_t count, CodedMoments to) {
  int64_t i = 0, here = 0;
  if (!lane_of(count, i, here)) return;
  EightMoments moments = {};
  for_eight(here,
            [&](int k) { moments.first[k] = first[i + k], moments.second[k] = second[i + k]; });
  store_moments(moments, i, here, to);
}

__global__ void __launch_bounds__(kThreads)
    decode_kernel(CodedMoments from, int64_t count, float* first, float* second) {
  int64_t i = 0, here = 0;
  if (!lane_of(count, i, here)) return;
  EightMoments moments;
  load_moments(from, i, here, moments);
  for_eight(here,
            [&](int k) { first[i + k] = moments.first[k], second[i + k] = moments.second[k]; });
}

unsigned coded_blocks(int64_t count) {
  return blocks_for(moment_blocks(count) * kMomentBlock, int64_t{kThreads} * 8);
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

void adamw_step(const AdamWStep& step, const CodedMoments& moments, cudaStream_t stream) {
  if (step.count == 0) return;
  coded_adamw_kernel<<<coded_blocks(step.count), kThreads, 0, stream>>>(step, moments);
  check_launch("adamw_step");
}

void encode_moments(const float* first, const float* second, int64_t count,
                    const CodedMoments& moments, cudaStream_t stream) {
  if (count == 0) return;
  encode_kernel<<<coded_blocks(count), kThreads, 0, stream>>>(first, second, count, moments);
  check_launch("encode_moments");
}

void decode_moments(const CodedMoments& moments, int64_t count, float* first, float* second,
                    cudaStream_t stream) {
  if (count == 0) return;
  decode_kernel<<<coded_blocks(count), kThreads, 0, stream>>>(moments, count, first, second);
  check_launch("decode_moments");
}

int64_t square_sums(int64_t count) { return (count + kPart - 1) / kPart; }

void sum_squares(const float* x, int64_t count, double* sums, cudaStream_t stream) {
  if (count == 0) return;
  squares_kernel<<<static_cast<unsigned>(square_sums(count)), kThreads, 0, stream>>>(x, count,
                                                                                     sums);
  check_launch("sum_squares");
}

}  // namespace leeway::cuda
