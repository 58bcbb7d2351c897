#include <cmath>
#include <type_traits>

#include "cuda/attention.h"
#include "cuda/attention_tile.cuh"

namespace leeway::cuda {
namespace {

using Bf16 = __nv_bfloat16;

constexpr int kStages = 2;  // tiles of keys and values in shared memory
constexpr int kTileWarps = kAttentionTileRows / 16;
constexpr int kTileThreads = kTileWarps * kWarp;

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

template <int kThreads>
__device__ __forceinline__ void synchronize() {
  if constexpr (kThreads > kWarp) {
    __syncthreads();
  } else {
    __syncwarp();
  }
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
template <int kDim, int kThreads>
struct TileCopies {
  using Layout = TileLayout<kDim>;
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
#pragma unroll
    for (int i = 0; i < kPages; ++i) {
      const int first_key = i * (kKeys >= kBlock ? kKeys : kBlock) + my_key;
      const int64_t row = places.place(first + first_key, page[i]);
      const Bf16 *key_row = keys + row * key_stride, *value_row = values + row * value_stride;
#pragma unroll 4
      for (int j = 0; j < kTimes / kPages; ++j) {
        const int key = first_key + j * kKeys;
        const bool there = mine && first + key < end;
        const uint32_t to = Layout::place(stage, key, my_piece);
        copy_piece(to, there ? key_row : keys, there);
        copy_piece(to + Layout::kBytes, there ? value_row : values, there);
        key_row += kKeys * key_stride, value_row += kKeys * value_stride;
      }
    }
  }
};

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

// ---------------------------------------------------------------------------------------------
// Chunks

__device__ __forceinline__ bool begins_chunk(int first) { return first % kChunkKeys == 0; }
__device__ __forceinline__ bool ends_chunk(int first) {
  return (first + kTileKeys) % kChunkKeys == 0;
}

// What the chunks so far have given. It is needed once in a chunk: an index that the compiler does
// not know puts it into the lane's own memory and leaves registers to the tiles.
template <int kDim>
struct Total {
  float memory[kDim / 2], most[2], sum[2];
  int zero;

  __device__ __forceinline__ Total() { asm volatile("mov.u32 %0, 0;" : "=r"(zero)); }
  __device__ __forceinline__ float& out(int n, int i) { return memory[n * 4 + i + zero]; }

  // `state` becomes the joined one if `last`, so that results are read from registers.
  __device__ __forceinline__ void join(ChunkState<kDim>& state, bool first, bool last,
                                       float scale) {
    state.sum[0] = row_sum(state.sum[0]);
    state.sum[1] = row_sum(state.sum[1]);
    if (first && last) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (first) {
        most[r] = state.most[r], sum[r] = state.sum[r];
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n) {
          out(n, 2 * r) = state.out[n][2 * r];
          out(n, 2 * r + 1) = state.out[n][2 * r + 1];
        }
        continue;
      }
      const JoinFactors factors = join_largest(most[r], state.most[r], scale);
      sum[r] = joined(sum[r], state.sum[r], factors);
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
#pragma unroll
        for (int i = 2 * r; i < 2 * r + 2; ++i) {
          const float both = joined(out(n, i), state.out[n][i], factors);
          if (last) {
            state.out[n][i] = both;
          } else {
            out(n, i) = both;
          }
        }
      }
      if (last) state.most[r] = most[r], state.sum[r] = sum[r];
    }
  }
};

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

// ---------------------------------------------------------------------------------------------
// Tiles of rows: one block for a tile and a query head

template <int kDim>
__global__ void __launch_bounds__(kTileThreads, kDim <= 128 ? 2 : 1)
    tiles_kernel(Attention attention, const AttentionTile* tiles, float scale) {
  using Layout = TileLayout<kDim>;
  extern __shared__ __align__(128) char shared[];
  const auto stages = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const AttentionTile tile = tiles[blockIdx.x];
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
  Total<kDim> total;
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
  with_dim(attention.sizes.head_dim, [&](auto dim) {
    constexpr int kDim = decltype(dim)::value;
    constexpr int kBytes = kSharedBytes<kDim>;
    allow_shared(tiles_kernel<kDim>, kBytes);
    const dim3 grid(static_cast<unsigned>(count),
                    static_cast<unsigned>(attention.sizes.query_heads));
    tiles_kernel<kDim>
        <<<grid, kTileThreads, kBytes, stream>>>(attention, tiles, scale_of(attention.sizes));
  });
  check_launch("attention of tiles");
}

}  // namespace leeway::cuda
