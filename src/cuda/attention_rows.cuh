// What the attention kernels share beside a tile's arithmetic: how keys and values come into shared
// memory, how chunks are joined, how a row's result is written.
#pragma once

#include <cstdint>

#include "cuda/attention.h"
#include "cuda/attention_tile.cuh"

namespace leeway::cuda {

using Bf16 = __nv_bfloat16;

// ---------------------------------------------------------------------------------------------
// Keys and values into shared memory

// 16 bytes, or zeros.
__device__ __forceinline__ void copy_piece(uint32_t to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(there ? 16 : 0));
}
__device__ __forceinline__ void end_of_copies() { asm volatile("cp.async.commit_group;"); }
template <int kLater>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLater));
}

// Where the positions of one sequence lie.
struct KeyPlaces {
  const int32_t* pages;  // null: packed
  int64_t first;         // packed: the row of position 0

  __device__ __forceinline__ int32_t page(int position) const {
    return pages == nullptr ? 0 : pages[position / static_cast<int>(kBlockKeys)];
  }
  // `page` is that of the position.
  __device__ __forceinline__ int64_t place(int position, int32_t page) const {
    return pages == nullptr ? first + position
                            : page * kBlockKeys + position % static_cast<int>(kBlockKeys);
  }
};

__device__ __forceinline__ KeyPlaces places_of(const Attention& attention, int64_t row) {
  const RowPlaces& at = attention.places;
  if (at.starts == nullptr) return {nullptr, row - at.positions[row]};
  return {at.pages + at.starts[row], 0};
}

// Copies the tiles of one sequence and one key/value head. A thread always takes the same piece of
// a key, of every kKeys-th key of a tile. Positions from `end` on, and pieces beyond the head's
// dimensions, are zeros.
template <int kDim, int kThreads, class Layout = TileLayout<kDim>>
struct TileCopies {
  static constexpr int kKeys = kThreads / Layout::kPieces;  // at a time
  static constexpr int kTimes = kTileKeys / kKeys;
  static constexpr int kBlock = static_cast<int>(kBlockKeys);
  static constexpr int kPages = kKeys >= kBlock ? kTimes : kTileKeys / kBlock;  // of a tile

  const Bf16 *keys, *values;
  int64_t key_stride, value_stride;
  KeyPlaces places;
  int end, my_key, my_piece;
  bool mine;             // the piece is one of the head's
  int32_t page[kPages];  // of the next tile, read ahead since copies depend on them

  __device__ __forceinline__ TileCopies(const Attention& attention, const KeyPlaces& at,
                                        int kv_head, int first, int after)
      : key_stride(attention.key_stride),
        value_stride(attention.value_stride),
        places(at),
        end(after) {
    const int head_dim = static_cast<int>(attention.sizes.head_dim);
    my_key = threadIdx.x / Layout::kPieces, my_piece = threadIdx.x % Layout::kPieces;
    mine = my_piece * 8 < head_dim;
    const int offset = kv_head * head_dim + (mine ? my_piece * 8 : 0);
    keys = static_cast<const Bf16*>(attention.keys) + offset;
    values = static_cast<const Bf16*>(attention.values) + offset;
    read_pages(first);
  }

  __device__ __forceinline__ void read_pages(int first) {
    if (places.pages == nullptr) return;
#pragma unroll
    for (int i = 0; i < kPages; ++i) {
      const int position = first + (kKeys >= kBlock ? my_key + i * kKeys : i * kBlock);
      page[i] = position < end ? places.page(position) : 0;
    }
  }

  __device__ __forceinline__ void queue(int first, uint32_t stage) {
    if (first + kTileKeys <= end && mine) {
      queue_keys<true>(first, stage);
    } else {
      queue_keys<false>(first, stage);
    }
  }
  // kAll: none of the tile's keys is beyond the end.
  template <bool kAll>
  __device__ __forceinline__ void queue_keys(int first, uint32_t stage) {
#pragma unroll
    for (int i = 0; i < kPages; ++i) {
      const int first_key = i * (kKeys >= kBlock ? kKeys : kBlock) + my_key;
      const int64_t row = places.place(first + first_key, page[i]);
      const Bf16 *key_row = keys + row * key_stride, *value_row = values + row * value_stride;
#pragma unroll 4
      for (int j = 0; j < kTimes / kPages; ++j) {
        const int key = first_key + j * kKeys;
        const uint32_t to = Layout::place(stage, key, my_piece);
        if constexpr (kAll) {
          copy_piece(to, key_row, true);
          copy_piece(to + Layout::kBytes, value_row, true);
        } else {
          const bool there = mine && first + key < end;
          copy_piece(to, there ? key_row : keys, there);
          copy_piece(to + Layout::kBytes, there ? value_row : values, there);
        }
        key_row += kKeys * key_stride, value_row += kKeys * value_stride;
      }
    }
  }
};

// ---------------------------------------------------------------------------------------------
// Chunks

__device__ __forceinline__ bool begins_chunk(int first) { return first % kChunkKeys == 0; }
__device__ __forceinline__ bool ends_chunk(int first) {
  return (first + kTileKeys) % kChunkKeys == 0;
}

// What the chunks so far have given. It is needed once in a chunk and lies in memory, so that the
// tiles have the registers: kDim / 8 pieces of the lane's own, kStride apart.
template <int kDim, int kStride = 1>
struct Total {
  float4* memory;
  float most[2], sum[2];

  __device__ __forceinline__ explicit Total(float4* pieces) : memory(pieces) {}

  // `state` becomes the joined one if `last`, so that results are read from registers.
  __device__ __forceinline__ void join(ChunkState<kDim>& state, bool first, bool last,
                                       float scale) {
    state.sum[0] = row_sum(state.sum[0]);
    state.sum[1] = row_sum(state.sum[1]);
    if (first && last) return;
    if (first) {
#pragma unroll
      for (int r = 0; r < 2; ++r) most[r] = state.most[r], sum[r] = state.sum[r];
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
        const float* out = state.out[n];
        memory[n * kStride] = make_float4(out[0], out[1], out[2], out[3]);
      }
      return;
    }
    JoinFactors factors[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      factors[r] = join_largest(most[r], state.most[r], scale);
      sum[r] = joined(sum[r], state.sum[r], factors[r]);
    }
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      // A few at a time, for want of registers.
      if (n % 4 == 0) asm volatile("" ::: "memory");
      const float4 before = memory[n * kStride];
      float* out = state.out[n];
      out[0] = joined(before.x, out[0], factors[0]);
      out[1] = joined(before.y, out[1], factors[0]);
      out[2] = joined(before.z, out[2], factors[1]);
      out[3] = joined(before.w, out[3], factors[1]);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) state.most[r] = most[r], state.sum[r] = sum[r];
    if (last) return;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      const float* out = state.out[n];
      memory[n * kStride] = make_float4(out[0], out[1], out[2], out[3]);
    }
  }
};

// An index that the compiler does not know: an array that is read with it stays in the lane's own
// memory.
__device__ __forceinline__ int unknown_zero() {
  int zero;
  asm volatile("mov.u32 %0, 0;" : "=r"(zero));
  return zero;
}

// Writes row r of a lane's two.
template <int kDim>
__device__ __forceinline__ void write_row(const ChunkState<kDim>& state, int r, int head_dim,
                                          Bf16* out) {
  const float inverse = __frcp_rn(state.sum[r]);
#pragma unroll
  for (int n = 0; n < kDim / 8; ++n) {
    const int at = n * 8 + threadIdx.x % 4 * 2;
    if (at >= head_dim) break;
    *reinterpret_cast<uint32_t*>(out + at) = pair_of(__fmul_rn(state.out[n][2 * r], inverse),
                                                     __fmul_rn(state.out[n][2 * r + 1], inverse));
  }
}

}  // namespace leeway::cuda
