// Attention of decode rows over the KV cache: one warp for a row and 16 of the query heads that
// share a key/value head. Bound by the bytes of keys and values, so everything else is arranged
// around their copies: they pass through a ring of pages in shared memory, of which all but one are
// on their way at any time; and the ring is small, so that many warps share a multiprocessor.

#include <algorithm>
#include <bit>
#include <cmath>
#include <type_traits>

#include "cuda/attention.h"
#include "cuda/attention_tile.cuh"
#include "cuda/early_launch.cuh"
#include "cuda/held_queries.cuh"
#include "cuda/page_copies.cuh"

namespace leeway::cuda {
namespace {

constexpr int kTilePages = kTileKeys / kPageKeys;
constexpr int kMostHeads = 16;   // of a warp
constexpr int64_t kBusy = 1056;  // blocks that keep a large device busy
constexpr int64_t kMostSplits = 64;
constexpr int64_t kMostWorkspace = int64_t{1} << 24;  // floats; rows beyond it are not split

struct DecodeStep {
  Attention attention;
  int parts, most_chunks;
  float scale;
  float* workspace;
  HeadStep heads;  // where the kernel makes the rows' heads itself
};

// What the chunks so far have given. It is needed once in a chunk: an index that the compiler does
// not know puts it into the lane's own memory and leaves registers to the tiles.
template <int kDim, int kRows>
struct Joined {
  float memory[kDim / 8 * 2 * kRows], most[kRows], sum[kRows];
  int zero;

  __device__ __forceinline__ Joined() { asm volatile("mov.u32 %0, 0;" : "=r"(zero)); }

  // `state` becomes the joined one.
  __device__ __forceinline__ void join(ChunkState<kDim>& state, bool first, bool last,
                                       float scale) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      state.sum[r] = row_sum(state.sum[r]);
      if (first && last) continue;
      JoinFactors factors = {};
      if (!first) {
        factors = join_largest(most[r], state.most[r], scale);
        state.most[r] = most[r];
        state.sum[r] = joined(sum[r], state.sum[r], factors);
      }
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
#pragma unroll
        for (int i = 2 * r; i < 2 * r + 2; ++i) {
          float& kept = memory[n * 2 * kRows + i + zero];
          if (!first) state.out[n][i] = joined(kept, state.out[n][i], factors);
          if (!last) kept = state.out[n][i];
        }
      }
      most[r] = state.most[r], sum[r] = state.sum[r];
    }
  }
};

// A chunk's result for one head: the weighted values, the sum of their weights, the largest score.
__device__ __forceinline__ float* partial_of(float* workspace, const HeadSizes& sizes, int64_t row,
                                             int64_t head, int chunks, int chunk) {
  return workspace + ((row * sizes.query_heads + head) * chunks + chunk) * (sizes.head_dim + 2);
}

// ---------------------------------------------------------------------------------------------
// A tile, page by page: the arithmetic of attention_tile.cuh for the rows that there are.

using TileScores = float[kTileKeys / 8][4];
using TileWeights = uint32_t[kTilePages][4];

// Scores of the 16 keys of a page.
template <int kDim, int kRows>
__device__ __forceinline__ void score_page(const HeldQueries<kDim, kRows>& queries, uint32_t page,
                                           float (*scores)[4]) {
  const int lane = threadIdx.x;
  const int key_row = lane / 16 * 8 + lane % 8, key_piece = lane / 8 % 2;
#pragma unroll
  for (int i = 0; i < 4; ++i) scores[0][i] = scores[1][i] = 0.0f;
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
    uint32_t words[4], b[4];
    queries.words_of(k, words);
    load_matrices(b, TileLayout<kDim>::place(page, key_row, 2 * k + key_piece));
    multiply_add(scores[0], words, b[0], b[1]);
    multiply_add(scores[1], words, b[2], b[3]);
  }
}

template <int kDim, int kRows>
__device__ __forceinline__ void weigh_tile(ChunkState<kDim>& state, TileScores& scores, int first,
                                           int last, float scale, TileWeights& weights) {
  if (first + kTileKeys - 1 > last) {
#pragma unroll
    for (int n = 0; n < kTileKeys / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2 * kRows; ++i) {
        if (first + n * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + i % 2 > last) {
          scores[n][i] = -INFINITY;
        }
      }
    }
  }
#pragma unroll
  for (int n = 0; kRows == 1 && n < kTilePages; ++n) weights[n][1] = weights[n][3] = 0u;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    float largest = state.most[r];
#pragma unroll
    for (int n = 0; n < kTileKeys / 8; ++n) {
      largest = fmaxf(largest, fmaxf(scores[n][2 * r], scores[n][2 * r + 1]));
    }
    largest = row_largest(largest);
    const float base = largest == -INFINITY ? 0.0f : largest;
    const float shrink = power_of_two(__fmul_rn(__fsub_rn(state.most[r], base), scale));
    state.most[r] = largest;
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < kTileKeys / 8; ++n) {
      const float low = power_of_two(__fmul_rn(__fsub_rn(scores[n][2 * r], base), scale));
      const float high = power_of_two(__fmul_rn(__fsub_rn(scores[n][2 * r + 1], base), scale));
      sum = __fadd_rn(sum, __fadd_rn(low, high));
      weights[n / 2][n % 2 * 2 + r] = pair_of(low, high);
    }
    state.sum[r] = __fmaf_rn(state.sum[r], shrink, sum);
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      state.out[n][2 * r] = __fmul_rn(state.out[n][2 * r], shrink);
      state.out[n][2 * r + 1] = __fmul_rn(state.out[n][2 * r + 1], shrink);
    }
  }
}

template <int kDim>
__device__ __forceinline__ void add_page(ChunkState<kDim>& state, const uint32_t* weights,
                                         uint32_t page) {
  const int lane = threadIdx.x;
  const int value_row = lane / 8 % 2 * 8 + lane % 8, value_piece = lane / 16;
#pragma unroll
  for (int n = 0; n < kDim / 16; ++n) {
    uint32_t b[4];
    load_matrices_turned(b, TileLayout<kDim>::place(page, value_row, 2 * n + value_piece));
    multiply_add(state.out[2 * n], weights, b[0], b[1]);
    multiply_add(state.out[2 * n + 1], weights, b[2], b[3]);
  }
}

// ---------------------------------------------------------------------------------------------

// With kRows = 1 a warp has at most 8 heads. kSplit: several warps may share a row's keys, which
// takes registers. kMakes: the rows' heads are made of `step.heads` on the way; heads have kDim
// dimensions. Shared memory: a ring of kSlots pages.
template <int kDim, int kSlots, int kRows, bool kSplit, bool kMakes>
__global__ void __launch_bounds__(kWarp) decode_kernel(const __grid_constant__ DecodeStep step) {
  using Layout = TileLayout<kDim>;
  constexpr int kPageBytes = kPageKeys * kDim * static_cast<int>(sizeof(Bf16));
  constexpr int kTileItems = 2 * kTilePages;  // pages of keys, then of values
  extern __shared__ __align__(128) char shared[];
  const auto ring = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  let_next_kernel_begin();
  const Attention& attention = step.attention;
  const int lane = threadIdx.x;
  const int64_t row = blockIdx.y;
  const int head_dim = static_cast<int>(attention.sizes.head_dim);
  const int query_heads = static_cast<int>(attention.sizes.query_heads);
  const int kv_heads = static_cast<int>(attention.sizes.kv_heads);
  const int group = query_heads / kv_heads;
  const int kv_head = blockIdx.x / step.parts, part = blockIdx.x % step.parts;
  const int first_head = kv_head * group + part * kMostHeads;
  const int count = min(kMostHeads, group - part * kMostHeads);
  const int position = attention.places.positions[row];

  // A split's keys: whole chunks.
  int begin = 0, end = position + 1;
  if constexpr (kSplit) {
    const int chunks = position / kChunkKeys + 1, splits = gridDim.z;
    const int share = (chunks + splits - 1) / splits;
    begin = static_cast<int>(blockIdx.z) * share * kChunkKeys;
    end = min(end, begin + share * kChunkKeys);
  }
  if (position < 0) {
    wait_for_earlier_kernels();
    auto* out = static_cast<Bf16*>(attention.out) + (row * query_heads + first_head) * head_dim;
    for (int i = lane * 8; blockIdx.z == 0 && i < count * head_dim; i += kWarp * 8) {
      *reinterpret_cast<uint4*>(out + i) = make_uint4(0, 0, 0, 0);
    }
    return;
  }
  if (begin >= end) return;
  const bool whole = !kSplit || (begin == 0 && end == position + 1);

  const int32_t* pages = attention.places.pages + attention.places.starts[row];
  PageCopies<kDim> copies(pages, head_dim, begin, end);
  const int piece = kv_head * head_dim + (copies.mine ? copies.my_piece * 8 : 0);
  const Bf16* keys = static_cast<const Bf16*>(attention.keys) + piece;
  const Bf16* values = static_cast<const Bf16*>(attention.values) + piece;
  // Item i of the tiles from `first` on. Keys that nobody sees are not copied; values are, as
  // zeros, since they are multiplied.
  const auto queue = [&](int first, int i, uint32_t slot) {
    first += i / kTileItems * kTileKeys;
    if (first < end) {
      const int item = i % kTileItems, page = first + item % kTilePages * kPageKeys;
      if (item == 0) copies.begin_tile(first);
      if (item >= kTilePages) {
        copies.queue(values, attention.value_stride, page, slot);
      } else if (page < end) {
        copies.queue(keys, attention.key_stride, page, slot);
      }
    }
    end_of_copies();
  };
  // Positions and pages are no kernel's. Keys and values before the row's own are of earlier
  // passes: copies that are of these alone begin while the kernel before this one still runs.
  constexpr int kFirstTiles = (kSlots + kTileItems - 1) / kTileItems;
  const bool early = begin + kFirstTiles * kTileKeys <= position;
  HeldQueries<kDim, kRows> queries;
  // A loop, so that the code of the copies exists once: they are queued before the heads or after.
#pragma unroll 1
  for (int turn = 0; turn < 2; ++turn) {
    if (early == (turn == 0)) {
#pragma unroll
      for (int i = 0; i < kSlots; ++i) queue(begin, i, ring + i * kPageBytes);
    }
    if (turn == 1) break;
    wait_for_earlier_kernels();
    if constexpr (kMakes) {
      // Of several parts of a head's queries each stores the same numbers, and reads its own.
      make_heads(step.heads,
                 {row, position, kv_head, first_head, count, /*stores=*/end == position + 1},
                 queries);
    } else {
      queries.hold(
          static_cast<const Bf16*>(attention.q) + row * attention.q_stride + first_head * head_dim,
          count, head_dim);
    }
  }
  ChunkState<kDim> state;
  Joined<kDim, kRows> total;
  uint32_t slot = ring;
  // The next item is there when this returns; `refill` puts the one kSlots further into its place.
  const auto next_item = [&] { wait_for_copies<kSlots - 1>(); };
  const auto refill = [&](int first, int item) {
    __syncwarp();
    queue(first, item + kSlots, slot);
    slot = slot + kPageBytes == ring + kSlots * kPageBytes ? ring : slot + kPageBytes;
  };
  for (int first = begin; first < end; first += kTileKeys) {
    if (first % kChunkKeys == 0) state.clear();
    TileScores scores;
    TileWeights weights;
#pragma unroll
    for (int page = 0; page < kTilePages; ++page) {
      next_item();
      score_page<kDim, kRows>(queries, slot, scores + 2 * page);
      refill(first, page);
    }
    weigh_tile<kDim, kRows>(state, scores, first, position, step.scale, weights);
#pragma unroll
    for (int page = 0; page < kTilePages; ++page) {
      next_item();
      add_page(state, weights[page], slot);
      refill(first, kTilePages + page);
    }

    const bool ends = first + kTileKeys >= end;
    if (!ends && (first + kTileKeys) % kChunkKeys != 0) continue;
    // A chunk that is written is the first and last of its own.
    total.join(state, !whole || first < kChunkKeys, !whole || ends, step.scale);
    if constexpr (kSplit) {
      if (whole) continue;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int head = lane / 4 + r * 8;
        if (head >= count) continue;
        float* partial = partial_of(step.workspace, attention.sizes, row, first_head + head,
                                    step.most_chunks, first / kChunkKeys);
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n) {
          const int at = n * 8 + lane % 4 * 2;
          if (at >= head_dim) break;
          partial[at] = state.out[n][2 * r];
          partial[at + 1] = state.out[n][2 * r + 1];
        }
        if (lane % 4 == 0) {
          partial[head_dim] = state.sum[r];
          partial[head_dim + 1] = state.most[r];
        }
      }
    }
  }
  if (!whole) return;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int head = lane / 4 + r * 8;
    if (head >= count) continue;
    auto* out =
        static_cast<Bf16*>(attention.out) + (row * query_heads + first_head + head) * head_dim;
    const float inverse = __frcp_rn(state.sum[r]);
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      const int at = n * 8 + lane % 4 * 2;
      if (at >= head_dim) break;
      *reinterpret_cast<uint32_t*>(out + at) = pair_of(__fmul_rn(state.out[n][2 * r], inverse),
                                                       __fmul_rn(state.out[n][2 * r + 1], inverse));
    }
  }
}

// One block for a head of a row whose chunks were split.
__global__ void join_kernel(Attention attention, int splits, int most_chunks, float scale,
                            float* workspace) {
  wait_for_earlier_kernels();
  const int64_t row = blockIdx.x, head = blockIdx.y;
  const int position = attention.places.positions[row];
  const int chunks = position / kChunkKeys + 1;
  const int share = (chunks + splits - 1) / splits;
  if (position < 0 || share >= chunks) return;
  const int head_dim = static_cast<int>(attention.sizes.head_dim);
  Bf16* out =
      static_cast<Bf16*>(attention.out) + (row * attention.sizes.query_heads + head) * head_dim;
  for (int d = threadIdx.x; d < head_dim; d += blockDim.x) {
    const float* partial = partial_of(workspace, attention.sizes, row, head, most_chunks, 0);
    float most = partial[head_dim + 1], sum = partial[head_dim], total = partial[d];
    for (int chunk = 1; chunk < chunks; ++chunk) {
      partial += head_dim + 2;
      const JoinFactors factors = join_largest(most, partial[head_dim + 1], scale);
      sum = joined(sum, partial[head_dim], factors);
      total = joined(total, partial[d], factors);
    }
    out[d] = __float2bfloat16(__fmul_rn(total, __frcp_rn(sum)));
  }
}

// ---------------------------------------------------------------------------------------------
// Launches

float scale_of(const HeadSizes& sizes) {
  return kLog2e / std::sqrt(static_cast<float>(sizes.head_dim));
}

struct DecodeGrid {
  int64_t parts;        // of the query heads of a key/value head, kMostHeads in each
  int64_t most_chunks;  // of a sequence
  int64_t splits;
};
DecodeGrid grid_of(const HeadSizes& sizes, int64_t rows, int64_t most_positions) {
  DecodeGrid grid;
  grid.parts = (sizes.query_heads / sizes.kv_heads + kMostHeads - 1) / kMostHeads;
  grid.most_chunks = (most_positions + kChunkKeys - 1) / kChunkKeys;
  const int64_t partials = rows * sizes.query_heads * grid.most_chunks * (sizes.head_dim + 2);
  grid.splits = partials > kMostWorkspace
                    ? 1
                    : std::clamp<int64_t>(kBusy / (rows * sizes.kv_heads * grid.parts), 1,
                                          std::min(kMostSplits, grid.most_chunks));
  return grid;
}

template <int kDim, int kSlots, int kRows, bool kMakes>
void launch(const DecodeStep& step, int64_t rows, int64_t splits, cudaStream_t stream) {
  const HeadSizes& sizes = step.attention.sizes;
  constexpr int kBytes = kSlots * kPageKeys * kDim * static_cast<int>(sizeof(Bf16));
  auto* kernel = splits > 1 ? decode_kernel<kDim, kSlots, kRows, true, kMakes>
                            : decode_kernel<kDim, kSlots, kRows, false, kMakes>;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
             "attention of decode rows, shared memory");
  const dim3 grid(static_cast<unsigned>(sizes.kv_heads * step.parts), static_cast<unsigned>(rows),
                  static_cast<unsigned>(splits));
  launch_early(kernel, grid, kWarp, size_t{kBytes}, stream, step);
}

template <int kDim, int kSlots>
void launch(const DecodeStep& step, int64_t rows, int64_t splits, cudaStream_t stream) {
  const HeadSizes& sizes = step.attention.sizes;
  const auto with_rows = [&](auto makes) {
    constexpr bool kMakes = decltype(makes)::value;
    sizes.query_heads / sizes.kv_heads <= 8
        ? launch<kDim, kSlots, 1, kMakes>(step, rows, splits, stream)
        : launch<kDim, kSlots, 2, kMakes>(step, rows, splits, stream);
  };
  step.heads.qkv != nullptr ? with_rows(std::true_type()) : with_rows(std::false_type());
}

}  // namespace

int64_t decode_workspace(const HeadSizes& sizes, int64_t most_positions) {
  int64_t most = 1;
  for (int64_t rows = 1; rows <= kBusy; ++rows) {
    const DecodeGrid grid = grid_of(sizes, rows, most_positions);
    if (grid.splits == 1) break;
    most = rows * sizes.query_heads * grid.most_chunks * (sizes.head_dim + 2);
  }
  return most;
}

bool makes_heads(const HeadSizes& sizes) {
  return std::has_single_bit(static_cast<uint64_t>(sizes.head_dim)) && sizes.head_dim >= 32 &&
         sizes.head_dim <= kMostHeadDim;
}

void attend_decode_rows(const Attention& attention, const HeadStep* heads, int64_t rows,
                        int64_t most_positions, float* workspace, cudaStream_t stream) {
  const HeadSizes& sizes = attention.sizes;
  if (sizes.head_dim % 8 != 0 || sizes.head_dim < 8 || sizes.head_dim > kMostHeadDim) {
    throw Error("attention: head_dim is not a multiple of 8 up to 256");
  }
  LEEWAY_CHECK(heads == nullptr || makes_heads(sizes), "heads of a power of two");
  if (rows == 0) return;
  const DecodeGrid at = grid_of(sizes, rows, most_positions);
  const DecodeStep step{attention,
                        static_cast<int>(at.parts),
                        static_cast<int>(at.most_chunks),
                        scale_of(sizes),
                        workspace,
                        heads != nullptr ? *heads : HeadStep{}};
  if (sizes.head_dim <= 32) {
    launch<32, 16>(step, rows, at.splits, stream);
  } else if (sizes.head_dim <= 64) {
    launch<64, 12>(step, rows, at.splits, stream);
  } else if (sizes.head_dim <= 128) {
    launch<128, 4>(step, rows, at.splits, stream);
  } else {
    launch<256, 8>(step, rows, at.splits, stream);
  }
  check_launch("attention of decode rows");
  if (at.splits == 1) return;
  const dim3 grid(static_cast<unsigned>(rows), static_cast<unsigned>(sizes.query_heads));
  launch_early(join_kernel, grid, 128, 0, stream, attention, static_cast<int>(at.splits),
               static_cast<int>(at.most_chunks), scale_of(sizes), workspace);
  check_launch("attention of decode rows, joining");
}

}  // namespace leeway::cuda
