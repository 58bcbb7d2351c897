#include <cfloat>

#include "cuda/device_math.cuh"
#include "cuda/sample_rows.h"

namespace leeway::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / kWarp;
constexpr int kSegment = 1024;  // ids

struct Largest {
  float value;
  int id;
  bool bad;  // a logit that no distribution can have occurred
};

__device__ inline Largest larger(const Largest& a, const Largest& b) {
  const bool second = b.value > a.value || (b.value == a.value && b.id < a.id);
  return {second ? b.value : a.value, second ? b.id : a.id, a.bad || b.bad};
}

__device__ inline Largest warp_largest(Largest x) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    const Largest other{__shfl_xor_sync(kAllLanes, x.value, step),
                        __shfl_xor_sync(kAllLanes, x.id, step),
                        __shfl_xor_sync(kAllLanes, static_cast<int>(x.bad), step) != 0};
    x = larger(x, other);
  }
  return x;
}

// The segment in which the cumulative sum exceeds `target`, and the sum before it. If rounding
// keeps the sum below its target, the last segment with a positive weight is used.
struct Place {
  int segment;
  double before, target, total, raw_total;
};

__device__ Place find_segment(const float* sums, const float* raw_sums, int segments,
                              double uniform) {
  Place place{0, 0.0, 0.0, 0.0, 0.0};
  for (int s = 0; s < segments; ++s) {
    place.total += static_cast<double>(sums[s]);
    place.raw_total += static_cast<double>(raw_sums[s]);
  }
  place.target = uniform * place.total;
  double reached = 0.0;
  for (int s = 0; s < segments && reached <= place.target; ++s) {
    if (sums[s] == 0.0f) continue;
    place.segment = s;
    place.before = reached;
    reached += static_cast<double>(sums[s]);
  }
  return place;
}

// By one warp: the first id of the segment at which the sum exceeds the target, or the last one
// with a positive weight.
template <class T>
__device__ int find_id(const T* logits, int vocabulary, float inverse, float shift,
                       const Place& place) {
  const int lane = threadIdx.x % kWarp;
  double before = place.before;
  int last = place.segment * kSegment;
  for (int base = place.segment * kSegment; base < min(vocabulary, (place.segment + 1) * kSegment);
       base += kWarp) {
    const int id = base + lane;
    const float weight = id < vocabulary ? expf(wide(logits[id]) * inverse - shift) : 0.0f;
    double sum = static_cast<double>(weight);
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
      const double lower = __shfl_up_sync(kAllLanes, sum, step);
      if (lane >= step) sum += lower;
    }
    const unsigned there = __ballot_sync(kAllLanes, weight > 0.0f);
    const unsigned beyond = __ballot_sync(kAllLanes, weight > 0.0f && before + sum > place.target);
    if (beyond != 0) return base + __ffs(static_cast<int>(beyond)) - 1;
    if (there != 0) last = base + kWarp - 1 - __clz(static_cast<int>(there));
    before += __shfl_sync(kAllLanes, sum, kWarp - 1);
  }
  return last;
}

template <class T>
__global__ void __launch_bounds__(kThreads) sample_kernel(SampleRows batch) {
  extern __shared__ float segment_sums[];  // [segments], then the raw ones
  __shared__ Largest warp_best[kWarps];
  __shared__ Place place;

  const int vocabulary = static_cast<int>(batch.vocabulary);
  const int segments = (vocabulary + kSegment - 1) / kSegment;
  float* raw_sums = segment_sums + segments;
  const T* logits = static_cast<const T*>(batch.logits) + batch.rows[blockIdx.x] * batch.vocabulary;
  const float inverse = batch.inverse_temperatures[blockIdx.x];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;

  Largest best{-INFINITY, vocabulary, false};
#pragma unroll 4
  for (int id = threadIdx.x; id < vocabulary; id += kThreads) {
    const float z = wide(logits[id]);
    best.bad = best.bad || !(z <= FLT_MAX);
    if (z > best.value) {
      best.value = z;
      best.id = id;
    }
  }
  best = warp_largest(best);
  if (lane == 0) warp_best[warp] = best;
  __syncthreads();
  best = warp_largest(warp_best[lane]);

  const float shift = best.value * inverse;
  if (best.bad || !isfinite(best.value) || !isfinite(shift)) {
    if (threadIdx.x == 0) batch.sampled[blockIdx.x] = {0, 0.0f, 0.0f, 1};
    return;
  }

  for (int segment = warp; segment < segments; segment += kWarps) {
    float sum = 0.0f, raw_sum = 0.0f;
    const int end = min(vocabulary, (segment + 1) * kSegment);
#pragma unroll 4
    for (int id = segment * kSegment + lane; id < end; id += kWarp) {
      const float z = wide(logits[id]);
      raw_sum += expf(z - best.value);
      if (inverse != 1.0f) sum += expf(z * inverse - shift);
    }
    raw_sum = warp_sum(raw_sum);
    sum = inverse == 1.0f ? raw_sum : warp_sum(sum);
    if (lane == 0) {
      segment_sums[segment] = sum;
      raw_sums[segment] = raw_sum;
    }
  }
  __syncthreads();
  if (warp != 0) return;
  if (lane == 0) {
    place = find_segment(segment_sums, raw_sums, segments, batch.uniforms[blockIdx.x]);
  }
  __syncwarp();
  const Place found = place;
  const bool certain = inverse == 0.0f;
  const int id = certain ? best.id : find_id(logits, vocabulary, inverse, shift, found);
  if (lane != 0) return;
  const float z = wide(logits[id]);
  SampledRow result;
  result.id = id;
  result.raw_logprob =
      static_cast<float>(static_cast<double>(z - best.value) - log(found.raw_total));
  result.processed_logprob =
      certain ? 0.0f
              : static_cast<float>(static_cast<double>(z * inverse - shift) - log(found.total));
  batch.sampled[blockIdx.x] = result;
}

}  // namespace

void sample_rows(Dtype dtype, const SampleRows& batch, cudaStream_t stream) {
  if (batch.draws == 0) return;
  const size_t segments = blocks_for(batch.vocabulary, kSegment);
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    sample_kernel<T>
        <<<static_cast<unsigned>(batch.draws), kThreads, 2 * segments * sizeof(float), stream>>>(
            batch);
  });
  check_launch("sample_rows");
}

}  // namespace leeway::cuda
