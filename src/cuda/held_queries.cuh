// Query heads of decode rows in a warp's registers: read from memory, or made there of what the
// product of a layer gave.
#pragma once

#include "cuda/page_copies.cuh"
#include "cuda/store_head.cuh"

namespace leeway::cuda {

// A warp's query heads in the order of mma operands.
template <int kDim, int kRows>
struct HeldQueries {
  uint32_t held[kDim / 16][2 * kRows];

  // heads [count, head_dim]
  __device__ __forceinline__ void hold(const Bf16* heads, int count, int head_dim) {
    const int lane = threadIdx.x;
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
#pragma unroll
      for (int i = 0; i < 2 * kRows; ++i) {
        const int head = lane / 4 + i % kRows * 8, at = k * 16 + i / kRows * 8 + lane % 4 * 2;
        held[k][i] = head < count && at < head_dim
                         ? *reinterpret_cast<const uint32_t*>(heads + head * head_dim + at)
                         : 0u;
      }
    }
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
#pragma unroll
      for (int i = 0; i < 2 * kRows; ++i) held[k][i] = 0u;
    }
  }
  // The head of number `head`, of kDim dimensions, from where the warp has made it.
  __device__ __forceinline__ void hold(int head, const HeldHead<kDim>& made) {
    constexpr int kHalf = kDim / 2, kPairs = HeldHead<kDim>::kMost;
    const int lane = threadIdx.x;
    uint32_t a[kPairs], b[kPairs];
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      a[n] = pair_of(made.a[n].x, made.a[n].y), b[n] = pair_of(made.b[n].x, made.b[n].y);
    }
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int at = k * 16 + j * 8, in_half = at % kHalf;  // of the lane's eight
        const uint32_t from = at < kHalf ? a[in_half / (2 * kWarp)] : b[in_half / (2 * kWarp)];
        const uint32_t word =
            __shfl_sync(kAllLanes, from, in_half % (2 * kWarp) / 2 + static_cast<int>(lane) % 4);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          if (lane / 4 + r * 8 == head) held[k][j * kRows + r] = word;
        }
      }
    }
  }
  __device__ __forceinline__ void words_of(int k, uint32_t* words) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] = kRows == 1 && i % 2 == 1 ? 0u : held[k][i / 2 * kRows + i % 2];
    }
  }
};

// What a warp has of a decode row: `count` query heads from `first_head` on, which share kv_head.
struct HeadsOfWarp {
  int64_t row;
  int position, kv_head, first_head, count;
  bool stores;  // the key and the value of `position` too
};

// What store_heads does to the warp's query heads, which it keeps, and where it stores to the key
// and the value that they see last. All loads are under way before the first is used, of two
// queries at a time.
template <int kDim, int kRows>
__device__ __forceinline__ void make_heads(const HeadStep& step, const HeadsOfWarp& of,
                                           HeldQueries<kDim, kRows>& queries) {
  const auto& [row, position, kv_head, first_head, count, stores] = of;
  constexpr int kHalf = kDim / 2;
  const int query_heads = static_cast<int>(step.sizes.query_heads);
  const int kv_heads = static_cast<int>(step.sizes.kv_heads);
  const Bf16* from = static_cast<const Bf16*>(step.qkv) + row * (query_heads + 2 * kv_heads) * kDim;
  const auto *query_norm = static_cast<const Bf16*>(step.query_norm),
             *key_norm = static_cast<const Bf16*>(step.key_norm);
  HeldHead<kDim> key, value, angles;
  int64_t place = 0;
  if (stores) {
    key.load(from + (query_heads + kv_head) * kDim, kHalf);
    value.load(from + (query_heads + kv_heads + kv_head) * kDim, kHalf);
    const int64_t page = step.places.pages[step.places.starts[row] + position / kPageKeys];
    place = ((page * kPageKeys + position % kPageKeys) * kv_heads + kv_head) * kDim;
  }
  const int64_t angle = static_cast<int64_t>(position) * kHalf;
  angles.load_angles(step.angles.cosines + angle, step.angles.sines + angle, kHalf);
  queries.clear();
#pragma unroll 1
  for (int i = 0; i < count; i += 2) {
    HeldHead<kDim> two[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      two[n].load(from + (first_head + min(i + n, count - 1)) * kDim, kHalf);
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      two[n].scale(query_norm, step.eps, kHalf);
      two[n].turn_by(angles);
      queries.hold(min(i + n, count - 1), two[n]);
    }
  }
  if (!stores) return;
  key.scale(key_norm, step.eps, kHalf);
  key.turn_by(angles);
  key.store(kHalf, static_cast<Bf16*>(step.keys) + place);
  value.store(kHalf, static_cast<Bf16*>(step.values) + place);
  // The warp's own copies read them.
  __threadfence_block();
  __syncwarp();
}

}  // namespace leeway::cuda
