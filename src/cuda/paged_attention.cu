#include <algorithm>
#include <bit>
#include <cmath>

#include "cuda/device_math.cuh"
#include "cuda/paged_attention.h"

namespace leeway::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarp;
constexpr int kDims = 8;        // of a key in each lane
constexpr int64_t kBusy = 528;  // blocks that keep a large device busy
constexpr int64_t kMostSplits = 32;
constexpr int kLeastKeys = 64;  // of a split that is worth a block

// How the query heads that share a key/value head are distributed over blocks.
struct Grouping {
  int heads_per_block, blocks_per_kv_head;
};
Grouping grouping_of(const HeadSizes& sizes) {
  const int group = static_cast<int>(sizes.query_heads / sizes.kv_heads);
  const int heads = group <= 2 ? group : 4;
  return {heads, (group + heads - 1) / heads};
}

int64_t splits_of(const HeadSizes& sizes, int64_t rows) {
  const int64_t blocks = rows * sizes.kv_heads * grouping_of(sizes).blocks_per_kv_head;
  return std::clamp(kBusy / blocks, int64_t{1}, kMostSplits);
}

// A split's result for one head: the weighted values, the sum of their weights, the largest score.
__device__ inline float* partial_of(const PagedAttention& attention, int64_t row, int64_t head,
                                    int splits, int split) {
  const int64_t place = (row * attention.sizes.query_heads + head) * splits + split;
  return attention.workspace + place * (attention.sizes.head_dim + 2);
}

// Blocks per multiprocessor, which bounds the registers of a thread: loads in flight come from many
// warps rather than from many loads of each.
template <int kHeads>
constexpr int kResident = kHeads <= 2 ? 4 : 3;

// kLanes lanes share a key, kDims dimensions each; those beyond the head's dimensions are zeros. A
// warp processes kSteps * (32 / kLanes) keys at a time, and the warps of a block take turns. Scores
// are in units of log 2.
template <int kLanes, int kHeads>
__global__ void __launch_bounds__(kThreads, kResident<kHeads>)
    attention_kernel(PagedAttention attention, int group, int blocks_per_kv_head, float scale,
                     int splits) {
  constexpr int kKeys = kWarp / kLanes;  // side by side
  constexpr int kSteps = kLanes >= 8 ? 4 : 2;
  constexpr int kStride = kWarps * kSteps * kKeys;
  constexpr int kMostDims = kLanes * kDims;
  __shared__ float warp_values[kWarps][kHeads][kMostDims];
  __shared__ float warp_most[kWarps][kHeads], warp_sums[kWarps][kHeads];

  const int64_t row = blockIdx.x;
  const int kv_head = blockIdx.y / blocks_per_kv_head;
  const int first_of_group = blockIdx.y % blocks_per_kv_head * kHeads;
  const int heads = min(kHeads, group - first_of_group);
  const int64_t first_head = static_cast<int64_t>(kv_head) * group + first_of_group;
  const int head_dim = static_cast<int>(attention.sizes.head_dim);
  const int64_t key_stride = attention.sizes.kv_heads * head_dim;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int dim = lane % kLanes * kDims, beside = lane / kLanes;

  // The keys of a split: a multiple of kLeastKeys, so that short sequences are not split.
  const int count = attention.places.positions[row] + 1;
  const int share = ((count + splits - 1) / splits + kLeastKeys - 1) / kLeastKeys * kLeastKeys;
  const int first = static_cast<int>(blockIdx.z) * share;
  const int end = min(count, first + share);
  const int32_t* pages = attention.places.pages + attention.places.starts[row];
  const float* keys = static_cast<const float*>(attention.keys) + kv_head * head_dim + dim;
  const float* values = static_cast<const float*>(attention.values) + kv_head * head_dim + dim;

  float q[kHeads][kDims], sum[kHeads], most[kHeads], weighted[kHeads][kDims];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    Eight<float> query = eight_zeros<float>();
    if (h < heads && dim < head_dim) {
      query = load_eight(static_cast<const float*>(attention.q) +
                         (row * attention.sizes.query_heads + first_head + h) * head_dim + dim);
    }
    sum[h] = 0.0f;
    most[h] = -INFINITY;
#pragma unroll
    for (int d = 0; d < kDims; ++d) {
      q[h][d] = query.values[d] * scale;
      weighted[h][d] = 0.0f;
    }
  }

  // Page numbers are read one round ahead, since the loads of keys and values depend on them.
  int page[kSteps];
  const auto read_pages = [&](int base) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int at = base + s * kKeys + beside;
      page[s] = at < end ? pages[at / kBlockKeys] : 0;
    }
  };
  int base = first + warp * kSteps * kKeys;
  read_pages(base);
  for (; base < end; base += kStride) {
    Eight<float> key[kSteps], value[kSteps];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int at = base + s * kKeys + beside;
      key[s] = eight_zeros<float>();
      value[s] = eight_zeros<float>();
      if (at < end && dim < head_dim) {
        const int64_t place = (page[s] * kBlockKeys + at % kBlockKeys) * key_stride;
        key[s] = load_eight(keys + place);
        value[s] = load_eight(values + place);
      }
    }
    read_pages(base + kStride);
    float score[kHeads][kSteps];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const bool there = base + s * kKeys + beside < end;
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        float dot = 0.0f;
#pragma unroll
        for (int d = 0; d < kDims; ++d) dot += q[h][d] * key[s].values[d];
#pragma unroll
        for (int step = kLanes / 2; step > 0; step /= 2) {
          dot += __shfl_xor_sync(kAllLanes, dot, step);
        }
        score[h][s] = there ? dot : -INFINITY;
      }
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      float largest = most[h];
#pragma unroll
      for (int s = 0; s < kSteps; ++s) largest = fmaxf(largest, score[h][s]);
#pragma unroll
      for (int step = kLanes; step < kWarp; step *= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, step));
      }
      const float shrink = exp2f(most[h] - largest);
      most[h] = largest;
      sum[h] *= shrink;
#pragma unroll
      for (int d = 0; d < kDims; ++d) weighted[h][d] *= shrink;
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const float weight = exp2f(score[h][s] - largest);
        sum[h] += weight;
#pragma unroll
        for (int d = 0; d < kDims; ++d) weighted[h][d] += weight * value[s].values[d];
      }
    }
  }

#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
#pragma unroll
    for (int step = kLanes; step < kWarp; step *= 2) {
      sum[h] += __shfl_xor_sync(kAllLanes, sum[h], step);
#pragma unroll
      for (int d = 0; d < kDims; ++d) {
        weighted[h][d] += __shfl_xor_sync(kAllLanes, weighted[h][d], step);
      }
    }
    if (lane == 0) {
      warp_most[warp][h] = most[h];
      warp_sums[warp][h] = sum[h];
    }
    if (beside == 0) {
#pragma unroll
      for (int d = 0; d < kDims; ++d) warp_values[warp][h][dim + d] = weighted[h][d];
    }
  }
  __syncthreads();

  for (int at = threadIdx.x; at < heads * head_dim; at += kThreads) {
    const int h = at / head_dim, d = at % head_dim;
    float largest = -INFINITY, total = 0.0f, result = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) largest = fmaxf(largest, warp_most[w][h]);
    if (first < end) {
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const float weight = exp2f(warp_most[w][h] - largest);
        total += weight * warp_sums[w][h];
        result += weight * warp_values[w][h][d];
      }
    }
    if (splits == 1) {
      float* out = static_cast<float*>(attention.out) +
                   (row * attention.sizes.query_heads + first_head + h) * head_dim;
      out[d] = (first < end ? result / total : 0.0f);
    } else {
      float* partial =
          partial_of(attention, row, first_head + h, splits, static_cast<int>(blockIdx.z));
      partial[d] = result;
      if (d == 0) {
        partial[head_dim] = total;
        partial[head_dim + 1] = largest;
      }
    }
  }
}

// One block per head of a row. A split without keys has sum 0.
__global__ void join_kernel(PagedAttention attention, int splits) {
  const int64_t row = blockIdx.x, head = blockIdx.y;
  const int head_dim = static_cast<int>(attention.sizes.head_dim);
  const float* partials = partial_of(attention, row, head, splits, 0);
  const int64_t stride = head_dim + 2;
  float largest = -INFINITY;
  for (int s = 0; s < splits; ++s) largest = fmaxf(largest, partials[s * stride + head_dim + 1]);
  float* out =
      static_cast<float*>(attention.out) + (row * attention.sizes.query_heads + head) * head_dim;
  for (int d = threadIdx.x; d < head_dim; d += kThreads) {
    float total = 0.0f, result = 0.0f;
    for (int s = 0; s < splits; ++s) {
      const float* partial = partials + s * stride;
      if (partial[head_dim] == 0.0f) continue;
      const float weight = exp2f(partial[head_dim + 1] - largest);
      total += weight * partial[head_dim];
      result += weight * partial[d];
    }
    out[d] = (attention.places.positions[row] < 0 ? 0.0f : result / total);
  }
}

template <int kLanes, int kHeads>
void launch(const PagedAttention& attention, cudaStream_t stream) {
  const HeadSizes& sizes = attention.sizes;
  const Grouping grouping = grouping_of(sizes);
  const auto rows = static_cast<unsigned>(attention.places.rows);
  const auto splits = static_cast<int>(splits_of(sizes, attention.places.rows));
  const float scale = kLog2e / std::sqrt(static_cast<float>(sizes.head_dim));
  const dim3 grid(rows, static_cast<unsigned>(sizes.kv_heads * grouping.blocks_per_kv_head),
                  static_cast<unsigned>(splits));
  attention_kernel<kLanes, kHeads><<<grid, kThreads, 0, stream>>>(
      attention, static_cast<int>(sizes.query_heads / sizes.kv_heads), grouping.blocks_per_kv_head,
      scale, splits);
  check_launch("paged_attention");
  if (splits == 1) return;
  const dim3 heads(rows, static_cast<unsigned>(sizes.query_heads));
  join_kernel<<<heads, kThreads, 0, stream>>>(attention, splits);
  check_launch("paged_attention, joining");
}

template <int kLanes>
void launch_for_heads(const PagedAttention& attention, cudaStream_t stream) {
  switch (grouping_of(attention.sizes).heads_per_block) {
    case 1: return launch<kLanes, 1>(attention, stream);
    case 2: return launch<kLanes, 2>(attention, stream);
    default: return launch<kLanes, 4>(attention, stream);
  }
}

}  // namespace

// Rows times splits stay below what `splits_of` divides.
int64_t attention_workspace(const HeadSizes& sizes) {
  const int64_t blocks = sizes.kv_heads * grouping_of(sizes).blocks_per_kv_head;
  return std::max<int64_t>(1, kBusy / blocks) * sizes.query_heads * (sizes.head_dim + 2);
}

void paged_attention(const PagedAttention& attention, cudaStream_t stream) {
  if (attention.places.rows == 0) return;
  const auto lanes = std::bit_ceil(static_cast<uint64_t>(attention.sizes.head_dim / kDims));
  switch (lanes) {
    case 1: return launch_for_heads<1>(attention, stream);
    case 2: return launch_for_heads<2>(attention, stream);
    case 4: return launch_for_heads<4>(attention, stream);
    case 8: return launch_for_heads<8>(attention, stream);
    case 16: return launch_for_heads<16>(attention, stream);
    case 32: return launch_for_heads<32>(attention, stream);
    default: throw Error("paged_attention: head_dim is not a multiple of 8 up to 256");
  }
}

}  // namespace leeway::cuda
