// Pages of the KV cache on their way into shared memory, for attention of decode rows
// (decode_attention.cu). What is done with them there, and in which order, is not said here.
#pragma once

#include "cuda/attention_tile.cuh"
#include "cuda/kv_pages.h"

namespace leeway::cuda {

using Bf16 = __nv_bfloat16;

constexpr int kPageKeys = static_cast<int>(kBlockKeys);

// Keys and values are read once in a pass, and until the next one all layers go through the cache:
// they are the first to leave it.
__device__ __forceinline__ uint64_t read_once() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
// 16 bytes, or zeros.
__device__ __forceinline__ void copy_piece(uint32_t to, const void* from, bool there,
                                           uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(to),
               "l"(from), "r"(there ? 16 : 0), "l"(policy));
}
__device__ __forceinline__ void end_of_copies() { asm volatile("cp.async.commit_group;"); }
template <int kLater>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLater) : "memory");
  __syncwarp();
}

// Pages of one sequence and one key/value head into shared memory, by a warp. The pages of a tile
// come in order, its keys before its values.
template <int kDim>
struct PageCopies {
  using Layout = TileLayout<kDim>;
  static constexpr int kKeys = kWarp / Layout::kPieces;  // at a time

  const int32_t* pages;  // of the sequence
  int end, my_key, my_piece;
  bool mine;                        // the piece is one of the head's
  int32_t chunk_pages, next_pages;  // a lane's of the chunk's 32, and of the next chunk's
  uint64_t policy = read_once();

  __device__ __forceinline__ PageCopies(const int32_t* of_sequence, int head_dim, int begin,
                                        int after)
      : pages(of_sequence), end(after) {
    const int lane = threadIdx.x;
    my_key = lane / Layout::kPieces, my_piece = lane % Layout::kPieces;
    mine = my_piece * 8 < head_dim;
    next_pages = page_of(begin);
  }

  // The lane's page of the chunk at `first`.
  __device__ __forceinline__ int32_t page_of(int first) const {
    const int position = first + static_cast<int>(threadIdx.x) * kPageKeys;
    return position < end ? pages[position / kPageKeys] : 0;
  }

  // Before the first copies of the tile at `first`.
  __device__ __forceinline__ void begin_tile(int first) {
    if (first % kChunkKeys != 0) return;
    chunk_pages = next_pages;
    next_pages = page_of(first + kChunkKeys);
  }

  // The page of positions `first` on; `from` is the array at the lane's piece of the head.
  // Positions from `end` on, and pieces beyond the head's dimensions, are zeros.
  __device__ __forceinline__ void queue(const Bf16* from, int64_t stride, int first,
                                        uint32_t to) const {
    const int64_t page = __shfl_sync(kAllLanes, chunk_pages, first % kChunkKeys / kPageKeys);
    const Bf16* row = from + (page * kPageKeys + my_key) * stride;
    const bool whole = mine && first + kPageKeys <= end;
#pragma unroll
    for (int j = 0; j < kPageKeys / kKeys; ++j) {
      const int key = j * kKeys + my_key;
      const bool there = whole || (mine && first + key < end);
      copy_piece(Layout::place(to, key, my_piece), there ? row : from, there, policy);
      row += kKeys * stride;
    }
  }
};

}  // namespace leeway::cuda
