#include <cmath>
#include <type_traits>

#include "cuda/attention.h"
#include "cuda/attention_rows.cuh"
#include "cuda/attention_warpgroups.h"

namespace leeway::cuda {
namespace {

constexpr int kStages = 2;     // tiles of keys and values in shared memory
constexpr int kPartRows = 64;  // of a tile that a block of threads takes
constexpr int kParts = kAttentionTileRows / kPartRows;
constexpr int kTileThreads = kPartRows / 16 * kWarp;

template <int kThreads>
__device__ __forceinline__ void synchronize() {
  if constexpr (kThreads > kWarp) {
    __syncthreads();
  } else {
    __syncwarp();
  }
}

// The loop over tiles that all kernels share: calls each(first, stage) in order for the tiles of
// positions begin .. end - 1, whose keys lie at `stage` in shared memory, and their values behind
// them, while it runs.
template <int kDim, int kThreads, class Each>
__device__ __forceinline__ void for_each_tile(const Attention& attention, const KeyPlaces& places,
                                              int kv_head, int begin, int end, uint32_t stages,
                                              Each&& each) {
  constexpr uint32_t kStageBytes = 2 * TileLayout<kDim>::kBytes;
  TileCopies<kDim, kThreads> copies(attention, places, kv_head, begin, end);
  copies.queue(begin, stages);
  end_of_copies();
  copies.read_pages(begin + kTileKeys);
  uint32_t stage = 0;
  for (int first = begin; first < end; first += kTileKeys) {
    const int next = first + kTileKeys;
    if (next < end) {
      copies.queue(next, stages + (stage ^ 1) * kStageBytes);
      copies.read_pages(next + kTileKeys);
    }
    end_of_copies();
    wait_for_copies<1>();
    synchronize<kThreads>();
    each(first, stages + stage * kStageBytes);
    synchronize<kThreads>();
    stage ^= 1;
  }
}

// The queries of a lane's two rows, null where there is none. They stay in registers while these
// suffice.
template <int kDim>
struct Queries {
  static constexpr bool kHeld = kDim <= 128;
  const Bf16* rows[2];
  int head_dim;
  uint32_t held[kHeld ? kDim / 16 : 1][4];

  __device__ __forceinline__ void load(int k, uint32_t* words) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = k * 16 + i / 2 * 8 + threadIdx.x % 4 * 2;
      const Bf16* row = rows[i % 2];
      words[i] =
          row == nullptr || at >= head_dim ? 0u : *reinterpret_cast<const uint32_t*>(row + at);
    }
  }
  __device__ __forceinline__ void hold() {
    if constexpr (kHeld) {
#pragma unroll
      for (int k = 0; k < kDim / 16; ++k) load(k, held[k]);
    }
  }
  __device__ __forceinline__ void operator()(int k, uint32_t* words) const {
    if constexpr (kHeld) {
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = held[k][i];
    } else {
      load(k, words);
    }
  }
};

// ---------------------------------------------------------------------------------------------
// Tiles of rows: one block for a part of a tile and a query head

template <int kDim>
__global__ void __launch_bounds__(kTileThreads, kDim <= 128 ? 2 : 1)
    tiles_kernel(Attention attention, const AttentionTile* tiles, float scale) {
  using Layout = TileLayout<kDim>;
  extern __shared__ __align__(128) char shared[];
  const auto stages = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  AttentionTile tile = tiles[blockIdx.x / kParts];
  // Parts that see more come first, as tiles do.
  const int part = kParts - 1 - static_cast<int>(blockIdx.x) % kParts;
  tile.first_row += part * kPartRows;
  tile.rows = min(tile.rows - part * kPartRows, kPartRows);
  if (tile.rows <= 0) return;
  const int head = blockIdx.y;
  const int head_dim = static_cast<int>(attention.sizes.head_dim);
  const int heads = static_cast<int>(attention.sizes.query_heads);
  const int kv_head = head / (heads / static_cast<int>(attention.sizes.kv_heads));
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int first_position = attention.places.positions[tile.first_row];
  const int end = first_position + tile.rows;

  Queries<kDim> queries;
  queries.head_dim = head_dim;
  int local[2], last[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    local[r] = warp * 16 + r * 8 + lane / 4;
    last[r] = first_position + local[r];
    const int64_t row = tile.first_row + local[r];
    queries.rows[r] = local[r] < tile.rows ? static_cast<const Bf16*>(attention.q) +
                                                 row * attention.q_stride + head * head_dim
                                           : nullptr;
  }
  queries.hold();
  // The last position that any row of the warp sees; none if the warp has no row.
  const int warp_last = warp * 16 < tile.rows ? min(end - 1, first_position + warp * 16 + 15) : -1;

  ChunkState<kDim> state;
  float4 pieces[kDim / 8];
  Total<kDim> total(pieces + unknown_zero());
  for_each_tile<kDim, kTileThreads>(attention, places_of(attention, tile.first_row), kv_head, 0,
                                    end, stages, [&](int first, uint32_t stage) {
                                      if (first > warp_last) return;
                                      if (begins_chunk(first)) state.clear();
                                      attend_tile<kDim>(state, queries, stage,
                                                        stage + Layout::kBytes, first, last, scale);
                                      const bool ends = first + kTileKeys > warp_last;
                                      if (ends || ends_chunk(first))
                                        total.join(state, first < kChunkKeys, ends, scale);
                                    });

#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (local[r] >= tile.rows) continue;
    const int64_t row = tile.first_row + local[r];
    write_row(state, r, head_dim,
              static_cast<Bf16*>(attention.out) + (row * heads + head) * head_dim);
    if (attention.lse != nullptr && lane % 4 == 0) {
      attention.lse[row * attention.lse_row + head * attention.lse_head] =
          log_sum(state.most[r], state.sum[r], scale);
    }
  }
}

// ---------------------------------------------------------------------------------------------
// Launches

float scale_of(const HeadSizes& sizes) {
  return kLog2e / std::sqrt(static_cast<float>(sizes.head_dim));
}

template <int kDim>
constexpr int kSharedBytes = kStages * 2 * TileLayout<kDim>::kBytes;

template <class Kernel>
void allow_shared(Kernel* kernel, int bytes) {
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
             "attention, shared memory");
}

// Calls body(dimensions), a constant that the head's dimensions are filled up to.
template <class Body>
void with_dim(int64_t head_dim, Body&& body) {
  if (head_dim % 8 != 0 || head_dim < 8 || head_dim > 256) {
    throw Error("attention: head_dim is not a multiple of 8 up to 256");
  }
  if (head_dim <= 32) return body(std::integral_constant<int, 32>());
  if (head_dim <= 64) return body(std::integral_constant<int, 64>());
  if (head_dim <= 128) return body(std::integral_constant<int, 128>());
  body(std::integral_constant<int, 256>());
}

}  // namespace

void attend_tiles(const Attention& attention, const AttentionTile* tiles, int64_t count,
                  cudaStream_t stream) {
  if (count == 0) return;
  const float scale = scale_of(attention.sizes);
  if (attend_tiles_by_warpgroups(attention, tiles, count, scale, stream)) return;
  with_dim(attention.sizes.head_dim, [&](auto dim) {
    constexpr int kDim = decltype(dim)::value;
    constexpr int kBytes = kSharedBytes<kDim>;
    allow_shared(tiles_kernel<kDim>, kBytes);
    const dim3 grid(static_cast<unsigned>(count * kParts),
                    static_cast<unsigned>(attention.sizes.query_heads));
    tiles_kernel<kDim><<<grid, kTileThreads, kBytes, stream>>>(attention, tiles, scale);
  });
  check_launch("attention of tiles");
}

}  // namespace leeway::cuda
