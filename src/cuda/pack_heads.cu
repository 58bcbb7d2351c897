#include "cuda/pack_heads.h"

#include <bit>

#include "cuda/early_launch.cuh"
#include "cuda/head_lanes.cuh"

namespace leeway::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kCount = 8;
constexpr int kParts = 2;  // of a row that a warp has at a time

// The sum of squares in the order of a warp whose lane l has numbers 2l and 2l + 1 of either half:
// each lane here has what four such lanes have, and joins them when they would be.
__device__ __forceinline__ float squares_of(const HeadPart<kCount>& head, int lanes) {
  float sums[4];
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    sums[t] = 0.0f;
    for (const float value : {head.a[2 * t], head.a[2 * t + 1], head.b[2 * t], head.b[2 * t + 1]}) {
      sums[t] = __fmaf_rn(value, value, sums[t]);
    }
  }
  for (int step = lanes / 2; step > 0; step /= 2) {
#pragma unroll
    for (float& sum : sums) sum += __shfl_xor_sync(kAllLanes, sum, step);
  }
  return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}

// A lane's part of a head, normed if there is a norm, and turned. Numbers i .. of either half.
template <class T>
__device__ __forceinline__ void norm_and_turn(HeadPart<kCount>& numbers, const T* norm, float eps,
                                              int head_dim, int lanes, int i,
                                              const HeadPart<kCount>& angles) {
  if (norm != nullptr) {
    HeadPart<kCount> weights;
    weights.load_halves(norm + i, norm + head_dim / 2 + i);
    const float inverse = inverse_norm(squares_of(numbers, lanes), head_dim, eps);
    const auto scaled = [&](float value, float weight) {
      return rounded<T>(__fmul_rn(rounded<T>(__fmul_rn(value, inverse)), weight));
    };
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      numbers.a[k] = scaled(numbers.a[k], weights.a[k]);
      numbers.b[k] = scaled(numbers.b[k], weights.b[k]);
    }
  }
#pragma unroll
  for (int k = 0; k < kCount; ++k) turn(numbers.a[k], numbers.b[k], angles.a[k], angles.b[k]);
}

// A warp for kParts times as many queries or keys of a row as it holds: their loads are under way
// together, and the row's angles are read once.
template <class T>
__global__ void __launch_bounds__(kThreads, 3)
    pack_heads_kernel(PackedHeads step, HeadLanes in_warp, int query_parts, int parts) {
  const int head_dim = static_cast<int>(step.sizes.head_dim), half = head_dim / 2;
  const int query_heads = static_cast<int>(step.sizes.query_heads);
  const int kv_heads = static_cast<int>(step.sizes.kv_heads);
  const unsigned at = blockIdx.x * kWarps + threadIdx.x / kWarp;
  const unsigned shares = (static_cast<unsigned>(parts) + kParts - 1) / kParts;
  const int64_t row = at / shares;
  const int first = static_cast<int>(at % shares) * kParts;
  if (row >= step.rows) return;
  const int64_t angle = static_cast<int64_t>(step.positions[row]) * half;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int i = lane % in_warp.lanes * kCount;

  struct Place {
    bool query;
    int head, heads;
  };
  const auto place_of = [&](int n) {
    const bool query = first + n < query_parts;
    const int part = query ? first + n : first + n - query_parts;
    return Place{query, part * in_warp.heads + lane / in_warp.lanes,
                 query ? query_heads : kv_heads};
  };
  LoadedHeadPart<kCount, T> loaded[kParts];
#pragma unroll
  for (int n = 0; n < kParts; ++n) {
    const Place place = place_of(n);
    if (place.head >= place.heads) continue;
    const int64_t head = row * (query_heads + 2 * kv_heads) + (place.query ? 0 : query_heads);
    const T* from = static_cast<const T*>(step.qkv) + (head + place.head) * head_dim + i;
    loaded[n].load_halves(from, from + half);
  }
  HeadPart<kCount> angles;
  angles.load_halves(step.angles.cosines + angle + i, step.angles.sines + angle + i);
#pragma unroll
  for (int n = 0; n < kParts; ++n) {
    const Place place = place_of(n);
    const bool there = place.head < place.heads;
    HeadPart<kCount> numbers;
    if (there) numbers.take(loaded[n]);
    norm_and_turn(numbers, static_cast<const T*>(place.query ? step.query_norm : step.key_norm),
                  step.eps, head_dim, in_warp.lanes, i, angles);
    if (!there) continue;
    T* to = static_cast<T*>(place.query ? step.q : step.k) +
            (row * place.heads + place.head) * head_dim + i;
    numbers.store_halves(to, to + half);
  }
}

// A warp for kAtOnce times as many queries, keys or values of a row as it holds: their loads are
// under way together. Keys and values go to their pages.
template <int kAtOnce, class T>
__global__ void __launch_bounds__(kThreads)
    store_heads_kernel(HeadStep step, HeadLanes in_warp, unsigned query_parts, unsigned kv_parts) {
  wait_for_earlier_kernels();
  let_next_kernel_begin();
  const int head_dim = static_cast<int>(step.sizes.head_dim), half = head_dim / 2;
  const int query_heads = static_cast<int>(step.sizes.query_heads);
  const int kv_heads = static_cast<int>(step.sizes.kv_heads);
  const unsigned parts = query_parts + 2 * kv_parts, shares = (parts + kAtOnce - 1) / kAtOnce;
  const unsigned at = blockIdx.x * kWarps + threadIdx.x / kWarp, first = at % shares * kAtOnce;
  const int64_t row = at / shares;
  if (row >= step.places.rows) return;
  const int position = step.places.positions[row];
  if (position < 0) return;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int i = lane % in_warp.lanes * kCount;

  struct Place {
    bool query, value;
    int head, heads;  // none where the first is not less
  };
  const auto place_of = [&](unsigned part) {
    const bool query = part < query_parts, value = part >= query_parts + kv_parts;
    const unsigned of_kind = part - (query ? 0 : value ? query_parts + kv_parts : query_parts);
    return Place{query, value, static_cast<int>(of_kind) * in_warp.heads + lane / in_warp.lanes,
                 query ? query_heads : kv_heads};
  };
  LoadedHeadPart<kCount, T> loaded[kAtOnce];
#pragma unroll
  for (int n = 0; n < kAtOnce; ++n) {
    const Place place = place_of(first + n);
    if (place.head >= place.heads) continue;
    const int before = place.query ? 0 : place.value ? query_heads + kv_heads : query_heads;
    const T* from = static_cast<const T*>(step.qkv) +
                    (row * (query_heads + 2 * kv_heads) + before + place.head) * head_dim + i;
    loaded[n].load_halves(from, from + half);
  }
  HeadPart<kCount> angles;
  if (first < query_parts + kv_parts) {
    const int64_t angle = static_cast<int64_t>(position) * half + i;
    angles.load_halves(step.angles.cosines + angle, step.angles.sines + angle);
  }
  int64_t kv_row = 0;  // where the row's keys and values lie
  if (first + kAtOnce > query_parts) {
    const int64_t page = step.places.pages[step.places.starts[row] + position / kBlockKeys];
    kv_row = page * kBlockKeys + position % kBlockKeys;
  }
#pragma unroll
  for (int n = 0; n < kAtOnce; ++n) {
    const Place place = place_of(first + n);
    const bool there = place.head < place.heads;
    HeadPart<kCount> numbers;
    if (there) numbers.take(loaded[n]);
    if (!place.value) {
      norm_and_turn(numbers, static_cast<const T*>(place.query ? step.query_norm : step.key_norm),
                    step.eps, head_dim, in_warp.lanes, i, angles);
    }
    if (!there) continue;
    T* to = static_cast<T*>(place.query   ? step.q
                            : place.value ? step.values
                                          : step.keys) +
            ((place.query ? row : kv_row) * place.heads + place.head) * head_dim + i;
    numbers.store_halves(to, to + half);
  }
}

}  // namespace

bool packs_side_by_side(int64_t head_dim) {
  return head_dim >= 2 * kCount && head_dim <= 4 * kWarp &&
         std::has_single_bit(static_cast<uint64_t>(head_dim));
}

void pack_heads_side_by_side(Dtype dtype, const PackedHeads& step, cudaStream_t stream) {
  const HeadLanes in_warp = head_lanes<kCount>(step.sizes.head_dim);
  const auto parts_of = [&](int64_t heads) {
    return static_cast<int>((heads + in_warp.heads - 1) / in_warp.heads);
  };
  const int query_parts = parts_of(step.sizes.query_heads);
  const int parts = query_parts + parts_of(step.sizes.kv_heads);
  const int64_t warps = step.rows * ((parts + kParts - 1) / kParts);
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    pack_heads_kernel<T>
        <<<blocks_for(warps, kWarps), kThreads, 0, stream>>>(step, in_warp, query_parts, parts);
  });
}

void store_heads_side_by_side(Dtype dtype, const HeadStep& step, cudaStream_t stream) {
  const HeadLanes in_warp = head_lanes<kCount>(step.sizes.head_dim);
  const auto parts_of = [&](int64_t heads) {
    return static_cast<unsigned>((heads + in_warp.heads - 1) / in_warp.heads);
  };
  const unsigned query_parts = parts_of(step.sizes.query_heads);
  const unsigned kv_parts = parts_of(step.sizes.kv_heads);
  const unsigned parts = query_parts + 2 * kv_parts;
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto launch = [&](auto* kernel, unsigned at_once) {
      const unsigned shares = (parts + at_once - 1) / at_once;
      launch_early(kernel, blocks_for(step.places.rows * shares, kWarps), kThreads, 0, stream, step,
                   in_warp, query_parts, kv_parts);
    };
    // With few rows a warp for each part is on more multiprocessors.
    step.places.rows < 1024 ? launch(store_heads_kernel<1, T>, 1)
                            : launch(store_heads_kernel<kParts, T>, kParts);
  });
}

}  // namespace leeway::cuda
