// Attention of decode rows over the KV cache: one warp for a row and 16 of the query heads that
// share a key/value head. Bound by the bytes of keys and values, so everything else is arranged
// around their copies: a warp needs the room of one tile of each, many warps share a
// multiprocessor, and copies of the first tiles are queued before the row's own heads are there.

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "cuda/attention.h"
#include "cuda/attention_tile.cuh"
#include "cuda/early_launch.cuh"
#include "cuda/norm_rope_swiglu.h"
#include "cuda/store_head.cuh"

namespace leeway::cuda {
namespace {

using Bf16 = __nv_bfloat16;

constexpr int kPageKeys = static_cast<int>(kBlockKeys);
constexpr int kTilePages = kTileKeys / kPageKeys;
constexpr int kMostHeads = 16;        // of a warp
constexpr int64_t kBusy = 792;        // blocks that keep a large device busy
constexpr int64_t kMostSplits = 64;
constexpr int64_t kMostWorkspace = int64_t{1} << 24;  // floats; rows beyond it are not split

struct DecodeStep {
  Attention attention;
  HeadStep fresh;  // without qkv: queries are ready, and all keys and values are stored
  int parts, most_chunks;
  float scale;
  float* workspace;
};

// 16 bytes, or zeros.
__device__ __forceinline__ void copy_piece(uint32_t to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(there ? 16 : 0));
}
__device__ __forceinline__ void end_of_copies() { asm volatile("cp.async.commit_group;"); }
template <int kLater>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLater) : "memory");
  __syncwarp();
}

// Tiles of one sequence and one key/value head into shared memory, by a warp. Positions from `end`
// on, and pieces beyond the head's dimensions, are zeros.
template <int kDim>
struct WarpCopies {
  using Layout = TileLayout<kDim>;
  static constexpr int kKeys = kWarp / Layout::kPieces;  // at a time

  const int32_t* pages;  // of the sequence
  int end, my_key, my_piece;
  bool mine;            // the piece is one of the head's
  int32_t chunk_pages, next_pages;  // a lane's of the chunk's 32, and of the next chunk's
  int32_t page[kTilePages];

  __device__ __forceinline__ WarpCopies(const int32_t* of_sequence, int head_dim, int begin,
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

  // Before the copies of the tile at `first`; tiles come in order.
  __device__ __forceinline__ void choose_tile(int first) {
    if (first % kChunkKeys == 0) {
      chunk_pages = next_pages;
      next_pages = page_of(first + kChunkKeys);
    }
#pragma unroll
    for (int i = 0; i < kTilePages; ++i) {
      page[i] = __shfl_sync(kAllLanes, chunk_pages, first % kChunkKeys / kPageKeys + i);
    }
  }

  // `from` is the array at the lane's piece of the head.
  __device__ __forceinline__ void queue(const Bf16* from, int64_t stride, int first,
                                        uint32_t tile) const {
    const bool whole = mine && first + kTileKeys <= end;
#pragma unroll
    for (int i = 0; i < kTilePages; ++i) {
      const Bf16* row = from + (static_cast<int64_t>(page[i]) * kPageKeys + my_key) * stride;
#pragma unroll 4
      for (int j = 0; j < kPageKeys / kKeys; ++j) {
        const int key = i * kPageKeys + j * kKeys + my_key;
        const bool there = whole || (mine && first + key < end);
        copy_piece(Layout::place(tile, key, my_piece), there ? row : from, there);
        row += kKeys * stride;
      }
    }
  }
};

// A warp's query heads in the order of mma operands.
template <int kDim, int kRows>
struct HeldQueries {
  uint32_t held[kDim / 16][2 * kRows];

  // heads [count, head_dim] in shared memory
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
  __device__ __forceinline__ void operator()(int k, uint32_t* words) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] = kRows == 1 && i % 2 == 1 ? 0u : held[k][i / 2 * kRows + i % 2];
    }
  }
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

// Heads [count, head_dim] to shared memory; loads are under way together.
__device__ __forceinline__ void copy_heads(const Bf16* from, int numbers, Bf16* to) {
  constexpr int kAhead = 2;
  for (int base = 0; base < numbers; base += kAhead * kWarp * 8) {
    uint4 loaded[kAhead];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const int at = base + (a * kWarp + static_cast<int>(threadIdx.x)) * 8;
      if (at < numbers) loaded[a] = *reinterpret_cast<const uint4*>(from + at);
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const int at = base + (a * kWarp + static_cast<int>(threadIdx.x)) * 8;
      if (at < numbers) *reinterpret_cast<uint4*>(to + at) = loaded[a];
    }
  }
}

// With kRows = 1 a warp has at most 8 heads. Shared memory: kStages tiles of keys and of values,
// then the warp's query heads, the row's key and its value.
template <int kDim, int kStages, int kRows>
__global__ void __launch_bounds__(kWarp) decode_kernel(const __grid_constant__ DecodeStep step) {
  using Layout = TileLayout<kDim>;
  extern __shared__ __align__(128) char shared[];
  const auto stages = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  auto* heads = reinterpret_cast<Bf16*>(shared + 2 * kStages * Layout::kBytes);
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
  const bool fresh = step.fresh.qkv != nullptr;

  // A split's keys: whole chunks.
  const int chunks = position / kChunkKeys + 1, splits = gridDim.z;
  const int share = (chunks + splits - 1) / splits;
  const int begin = static_cast<int>(blockIdx.z) * share * kChunkKeys;
  const int end = min(position + 1, begin + share * kChunkKeys);
  if (position < 0) {
    wait_for_earlier_kernels();
    auto* out = static_cast<Bf16*>(attention.out) + (row * query_heads + first_head) * head_dim;
    for (int i = lane * 8; blockIdx.z == 0 && i < count * head_dim; i += kWarp * 8) {
      *reinterpret_cast<uint4*>(out + i) = make_uint4(0, 0, 0, 0);
    }
    return;
  }
  if (begin >= end) return;
  const bool newest = end == position + 1, whole = begin == 0 && newest;

  const int32_t* pages = attention.places.pages + attention.places.starts[row];
  WarpCopies<kDim> copies(pages, head_dim, begin, fresh && newest ? position : end);
  const int piece = kv_head * head_dim + (copies.mine ? copies.my_piece * 8 : 0);
  const Bf16* keys = static_cast<const Bf16*>(attention.keys) + piece;
  const Bf16* values = static_cast<const Bf16*>(attention.values) + piece;
  const auto keys_at = [&](int stage) { return stages + 2 * stage * Layout::kBytes; };
  const auto values_at = [&](int stage) { return keys_at(stage) + Layout::kBytes; };
  const auto queue_keys = [&](int first, int stage) {
    if (first < end) {
      copies.choose_tile(first);
      copies.queue(keys, attention.key_stride, first, keys_at(stage));
    }
    end_of_copies();
  };
  const auto queue_values = [&](int first, int stage) {
    if (first < end) copies.queue(values, attention.value_stride, first, values_at(stage));
    end_of_copies();
  };
  // Old keys and values: no earlier kernel of this pass writes them. Without fresh heads one does.
  if (!fresh) wait_for_earlier_kernels();
#pragma unroll
  for (int s = 0; s < kStages; ++s) {
    queue_keys(begin + s * kTileKeys, s);
    queue_values(begin + s * kTileKeys, s);
  }
  if (fresh) wait_for_earlier_kernels();

  Bf16 *new_key = heads + count * head_dim, *new_value = new_key + head_dim;
  if (fresh) {
    const auto* qkv = static_cast<const Bf16*>(step.fresh.qkv) +
                      row * (query_heads + 2 * kv_heads) * head_dim;
    copy_heads(qkv + first_head * head_dim, count * head_dim, heads);
    if (newest) {
      copy_heads(qkv + (query_heads + kv_head) * head_dim, head_dim, new_key);
      copy_heads(qkv + (query_heads + kv_heads + kv_head) * head_dim, head_dim, new_value);
    }
    __syncwarp();
    const int64_t angle = static_cast<int64_t>(position) * (head_dim / 2);
    for (int h = 0; h < count + (newest ? 1 : 0); ++h) {
      const void* norm = h < count ? step.fresh.query_norm : step.fresh.key_norm;
      store_head<kDim>(heads + h * head_dim, static_cast<const Bf16*>(norm), step.fresh.eps,
                       step.fresh.angles.cosines + angle, step.fresh.angles.sines + angle, head_dim,
                       heads + h * head_dim);
    }
    __syncwarp();
    if (newest && part == 0 && lane * 8 < head_dim) {
      const int64_t place = static_cast<int64_t>(pages[position / kPageKeys]) * kPageKeys +
                            position % kPageKeys;
      const int at = kv_head * head_dim + lane * 8;
      *reinterpret_cast<uint4*>(static_cast<Bf16*>(step.fresh.keys) +
                                place * attention.key_stride + at) =
          *reinterpret_cast<const uint4*>(new_key + lane * 8);
      *reinterpret_cast<uint4*>(static_cast<Bf16*>(step.fresh.values) +
                                place * attention.value_stride + at) =
          *reinterpret_cast<const uint4*>(new_value + lane * 8);
    }
  } else {
    copy_heads(static_cast<const Bf16*>(attention.q) + row * attention.q_stride +
                   first_head * head_dim,
               count * head_dim, heads);
    __syncwarp();
  }
  // The row's own key or value into its place in the last tile.
  const auto put = [&](const Bf16* from, int first, uint32_t tile) {
    if (!fresh || first + kTileKeys <= position) return;
    if (lane * 8 < head_dim) {
      const uint4 four = *reinterpret_cast<const uint4*>(from + lane * 8);
      asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(
                       Layout::place(tile, position - first, lane)),
                   "r"(four.x), "r"(four.y), "r"(four.z), "r"(four.w)
                   : "memory");
    }
    __syncwarp();
  };

  HeldQueries<kDim, kRows> queries;
  queries.hold(heads, count, head_dim);
  const int last[2] = {position, position};
  ChunkState<kDim> state;
  Joined<kDim, kRows> total;
  int stage = 0;
  for (int first = begin; first < end; first += kTileKeys) {
    if (first % kChunkKeys == 0) state.clear();
    TileWeights weights;
    wait_for_copies<2 * kStages - 1>();
    put(new_key, first, keys_at(stage));
    weigh_keys<kDim, kRows>(state, queries, keys_at(stage), first, last, step.scale, weights);
    __syncwarp();
    queue_keys(first + kStages * kTileKeys, stage);
    wait_for_copies<2 * kStages - 1>();
    put(new_value, first, values_at(stage));
    add_values(state, weights, values_at(stage));
    __syncwarp();
    queue_values(first + kStages * kTileKeys, stage);
    stage = stage + 1 == kStages ? 0 : stage + 1;

    const bool ends = first + kTileKeys >= end;
    if (!ends && (first + kTileKeys) % kChunkKeys != 0) continue;
    // A chunk that is written is the first and last of its own.
    total.join(state, !whole || first < kChunkKeys, !whole || ends, step.scale);
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

template <int kDim, int kStages, int kRows>
void launch(const DecodeStep& step, int64_t rows, int64_t splits, cudaStream_t stream) {
  const HeadSizes& sizes = step.attention.sizes;
  const int64_t heads = std::min<int64_t>(kMostHeads, sizes.query_heads / sizes.kv_heads) + 2;
  const auto bytes = static_cast<int>(2 * kStages * TileLayout<kDim>::kBytes +
                                      heads * sizes.head_dim * static_cast<int64_t>(sizeof(Bf16)));
  check_cuda(cudaFuncSetAttribute(decode_kernel<kDim, kStages, kRows>,
                                  cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
             "attention of decode rows, shared memory");
  const dim3 grid(static_cast<unsigned>(sizes.kv_heads * step.parts), static_cast<unsigned>(rows),
                  static_cast<unsigned>(splits));
  launch_early(decode_kernel<kDim, kStages, kRows>, grid, kWarp, static_cast<size_t>(bytes), stream,
               step);
}

template <int kDim, int kStages>
void launch(const DecodeStep& step, int64_t rows, int64_t splits, cudaStream_t stream) {
  const HeadSizes& sizes = step.attention.sizes;
  sizes.query_heads / sizes.kv_heads <= 8 ? launch<kDim, kStages, 1>(step, rows, splits, stream)
                                          : launch<kDim, kStages, 2>(step, rows, splits, stream);
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

void attend_decode_rows(const Attention& attention, const HeadStep* fresh, int64_t rows,
                        int64_t most_positions, float* workspace, cudaStream_t stream) {
  const HeadSizes& sizes = attention.sizes;
  if (sizes.head_dim % 8 != 0 || sizes.head_dim < 8 || sizes.head_dim > kMostHeadDim) {
    throw Error("attention: head_dim is not a multiple of 8 up to 256");
  }
  if (rows == 0) return;
  const DecodeGrid at = grid_of(sizes, rows, most_positions);
  DecodeStep step{attention, fresh != nullptr ? *fresh : HeadStep{}, static_cast<int>(at.parts),
                  static_cast<int>(at.most_chunks), scale_of(sizes), workspace};
  if (sizes.head_dim <= 32) {
    launch<32, 4>(step, rows, at.splits, stream);
  } else if (sizes.head_dim <= 64) {
    launch<64, 2>(step, rows, at.splits, stream);
  } else if (sizes.head_dim <= 128) {
    launch<128, 1>(step, rows, at.splits, stream);
  } else {
    launch<256, 1>(step, rows, at.splits, stream);
  }
  check_launch("attention of decode rows");
  if (at.splits == 1) return;
  const dim3 heads(static_cast<unsigned>(rows), static_cast<unsigned>(sizes.query_heads));
  launch_early(join_kernel, heads, 128, 0, stream, attention, static_cast<int>(at.splits),
               static_cast<int>(at.most_chunks), scale_of(sizes), workspace);
  check_launch("attention of decode rows, joining");
}

}  // namespace leeway::cuda
