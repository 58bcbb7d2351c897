// The softmax of a row of logits in parts whose sums have a fixed order: a row is kParts parts, a
// part is summed by kThreads threads, a thread takes every kThreads-th pack of 16 bytes, and lanes,
// warps and parts are combined in turn. The result does not depend on which kernel computes it or
// what else is running.
//
// Exponentials are powers of two; scale is log2(e) / temperature. Multiplications and additions
// that go together are written as fmaf, so that every kernel rounds them alike.
#pragma once

#include <cstdint>

#include "cuda/device_math.cuh"
#include "cuda/head_rows.h"

namespace leeway::cuda {

inline constexpr int kParts = 8;  // the largest cluster that every GPU offers
inline constexpr int kThreads = 256;

__device__ __forceinline__ float exp2_of(float x) {
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
}

// 16 bytes of logits.
template <class T>
struct Pack;
template <>
struct Pack<float> {
  static constexpr int kSize = 4;
  __device__ static void load(const uint4& raw, float* to) {
    to[0] = __uint_as_float(raw.x);
    to[1] = __uint_as_float(raw.y);
    to[2] = __uint_as_float(raw.z);
    to[3] = __uint_as_float(raw.w);
  }
};
template <>
struct Pack<__nv_bfloat16> {
  static constexpr int kSize = 8;
  __device__ static void load(const uint4& raw, float* to) {
    const unsigned words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      to[2 * k] = __uint_as_float(words[k] << 16);
      to[2 * k + 1] = __uint_as_float(words[k] & 0xffff0000u);
    }
  }
};

__device__ __forceinline__ unsigned two_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const unsigned*>(&pair);
}

// Writes kSize numbers; the address is aligned to what they take.
template <class T, int kSize>
__device__ __forceinline__ void store(T* to, const float* values) {
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int k = 0; k < kSize; k += 4) {
      *reinterpret_cast<float4*>(to + k) =
          make_float4(values[k], values[k + 1], values[k + 2], values[k + 3]);
    }
  } else if constexpr (kSize == 8) {
    *reinterpret_cast<uint4*>(to) =
        make_uint4(two_bf16(values[0], values[1]), two_bf16(values[2], values[3]),
                   two_bf16(values[4], values[5]), two_bf16(values[6], values[7]));
  } else {
    *reinterpret_cast<uint2*>(to) =
        make_uint2(two_bf16(values[0], values[1]), two_bf16(values[2], values[3]));
  }
}

__device__ __forceinline__ float larger_or_nan(float a, float b) {
  float out;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(b));
  return out;
}

// Of the logits z seen so far: the largest, the sum of 2^x and the sum of 2^x x, where
// x = (z - largest) scale. The largest one has x = 0 exactly.
struct Softmax {
  float largest = -INFINITY, sum = 0.0f, weighted = 0.0f;

  __device__ __forceinline__ void raise(float to, float scale) {
    const float shift = (largest - to) * scale, factor = exp2_of(shift);
    weighted = sum == 0.0f ? 0.0f : fmaf(shift, sum, weighted) * factor;
    sum *= factor;
    largest = to;
  }
  __device__ __forceinline__ void add(float z, float scale) {  // z <= largest, or NaN
    // Minus infinity contributes nothing; NaN propagates.
    const float x = larger_or_nan((z - largest) * scale, -1e30f), e = exp2_of(x);
    sum += e;
    weighted = fmaf(e, x, weighted);
  }
  __device__ void join(Softmax other, float scale) {
    if (other.largest > largest) {
      const Softmax mine = *this;
      *this = other;
      other = mine;
    }
    if (other.sum == 0.0f) return;
    const float shift = (other.largest - largest) * scale;
    if (shift == 0.0f || isnan(shift)) {
      sum += other.sum;
      weighted += other.weighted;
      return;
    }
    const float factor = exp2_of(shift);
    weighted = fmaf(fmaf(shift, other.sum, other.weighted), factor, weighted);
    sum = fmaf(other.sum, factor, sum);
  }
  __device__ float entropy() const { return kLn2 * (log2f(sum) - weighted / sum); }
};

__device__ inline Softmax shuffle_down(const Softmax& s, int offset) {
  Softmax other;
  other.largest = __shfl_down_sync(0xffffffffu, s.largest, offset);
  other.sum = __shfl_down_sync(0xffffffffu, s.sum, offset);
  other.weighted = __shfl_down_sync(0xffffffffu, s.weighted, offset);
  return other;
}

// Over a warp; valid in lane 0.
__device__ inline Softmax join_warp(Softmax s, float scale) {
  for (int offset = 16; offset > 0; offset /= 2) s.join(shuffle_down(s, offset), scale);
  return s;
}

// Over a block; valid in thread 0.
__device__ inline Softmax join_block(Softmax s, float scale, Softmax* shared) {
  s = join_warp(s, scale);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = s;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < kThreads / 32; ++w) s.join(shared[w], scale);
  }
  return s;
}

template <int kSize>
__device__ __forceinline__ void add_pack(Softmax& softmax, const float* logits, float scale) {
  float largest = logits[0];
#pragma unroll
  for (int k = 1; k < kSize; ++k) largest = fmaxf(largest, logits[k]);
  if (largest > softmax.largest) softmax.raise(largest, scale);
  if (softmax.largest == -INFINITY) {
    // Nothing finite yet: only NaN can matter.
#pragma unroll
    for (int k = 0; k < kSize; ++k) {
      if (isnan(logits[k])) softmax.sum = NAN;
    }
    return;
  }
#pragma unroll
  for (int k = 0; k < kSize; ++k) softmax.add(logits[k], scale);
}

struct RowPlace {
  int64_t token;
  float scale;  // log2(e) / temperature
  float inverse_temperature;
};

__device__ inline RowPlace place_of(const RowChunk& chunk, int64_t row) {
  RowPlace place;
  const int64_t k = chunk.first + row;
  place.token = chunk.rows != nullptr ? chunk.rows[k] : k;
  float temperature = 1.0f;
  if (chunk.temperature != nullptr) {
    temperature = chunk.temperature[chunk.temperature_per_token ? place.token : 0];
  }
  place.inverse_temperature = 1.0f / temperature;
  place.scale = kLog2e * place.inverse_temperature;
  return place;
}

// The logprob of a logit that is among those summed.
__device__ __forceinline__ float logprob_of(const Softmax& all, float logit, float scale) {
  return kLn2 * fmaf(logit - all.largest, scale, -log2f(all.sum));
}

// By one warp, valid in lane 0: the product of a hidden state and a row of the head's weight, which
// is the exact logit of that token. Products of bf16 are exact in float32.
template <class T>
__device__ __forceinline__ float exact_logit(const T* hidden, const T* weight, int64_t size) {
  float sum = 0.0f;
#pragma unroll 8  // loads under way at a time
  for (int64_t k = threadIdx.x % kWarp; k < size; k += kWarp) {
    sum = fmaf(wide(hidden[k]), wide(weight[k]), sum);
  }
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    sum += __shfl_down_sync(kAllLanes, sum, offset);
  }
  return sum;
}

// Columns of one part of a row; all parts begin with a whole pack.
template <class T>
int64_t part_size_of(int64_t vocabulary) {
  constexpr int64_t kPack = Pack<T>::kSize;
  return ((vocabulary + kParts - 1) / kParts + kPack - 1) / kPack * kPack;
}

// Columns of one part of a row.
struct PartPlace {
  int64_t begin;
  int size;
};
__device__ inline PartPlace part_of(int64_t vocabulary, int64_t part_size, int part) {
  const int64_t begin = part_size * part;
  const int64_t left = vocabulary - begin;
  return {begin, static_cast<int>(left <= 0 ? 0 : left < part_size ? left : part_size)};
}

// The exact logit of the target in the place of the rounded one, where a pack holds it.
template <class T>
struct Target {
  static constexpr int kSize = Pack<T>::kSize;
  float exact;
  int pack, lane;  // pack -1: in another part

  __device__ Target(int64_t target, float logit, const PartPlace& part) : exact(logit) {
    const int64_t here = target - part.begin;
    pack = here >= 0 && here < part.size ? static_cast<int>(here / kSize) : -1;
    lane = static_cast<int>(here % kSize);
  }
  __device__ __forceinline__ void unpack(const uint4& raw, int p, float* values) const {
    Pack<T>::load(raw, values);
    if (p != pack) return;
#pragma unroll
    for (int k = 0; k < kSize; ++k) values[k] = k == lane ? exact : values[k];
  }
};

// A thread's share of a part. kAhead loads are in flight at a time.
template <class T, int kAhead>
__device__ __forceinline__ Softmax sum_part(const uint4* from, int size, const Target<T>& target,
                                            float scale) {
  constexpr int kSize = Pack<T>::kSize;
  Softmax softmax;
  const int whole = size / kSize;
  for (int first = threadIdx.x; first < whole; first += kAhead * kThreads) {
    uint4 raw[kAhead];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const int p = first + a * kThreads;
      if (p < whole) raw[a] = from[p];
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const int p = first + a * kThreads;
      if (p >= whole) break;
      float values[kSize];
      target.unpack(raw[a], p, values);
      add_pack<kSize>(softmax, values, scale);
    }
  }
  if (whole * kSize < size && whole % kThreads == static_cast<int>(threadIdx.x)) {
    float values[kSize];
    target.unpack(from[whole], whole, values);
#pragma unroll
    for (int k = 0; k < kSize; ++k) {
      if (whole * kSize + k >= size) values[k] = -INFINITY;
    }
    add_pack<kSize>(softmax, values, scale);
  }
  return softmax;
}

// Lane b of the first warp holds part b; lane 0 gets all, part after part.
__device__ inline Softmax join_parts(Softmax of_lane, float scale) {
  Softmax all = of_lane, next = of_lane;
  for (int b = 1; b < kParts; ++b) {
    next = shuffle_down(next, 1);
    all.join(next, scale);
  }
  return all;
}

}  // namespace leeway::cuda
