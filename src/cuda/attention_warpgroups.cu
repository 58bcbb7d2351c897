#include "cuda/attention_warpgroups.h"

#include <algorithm>

#include "cuda/attention_items.cuh"
#include "cuda/attention_rows.cuh"
#include "cuda/warpgroup.cuh"

namespace leeway::cuda {
namespace {

// Keys and values that blocks read at a time, so that they stay in the cache of a large device.
constexpr int64_t kCachedBytes = int64_t{20} << 20;
constexpr int kPartRows = warpgroup::kRows;
constexpr int kWarps = warpgroup::kThreads / kWarp;

// A block: one warpgroup copies, kConsumers compute, each 64 rows. These have a query head each
// where as many share their keys, or else the halves of a tile.
template <int kDimensions, int kComputing>
struct Plan {
  static constexpr int kDim = kDimensions, kConsumers = kComputing;
  static constexpr int kThreads = (1 + kConsumers) * warpgroup::kThreads;
  // All registers of a multiprocessor, of which copying needs few.
  static constexpr int kCopyRegisters = 56;
  static constexpr int kComputeRegisters = kConsumers == 2 ? 224 : 152;
  static constexpr int kStages = kDim <= 64 ? 8 : 4;  // tiles of keys and values in shared memory
  // Tiles whose copies run while the next is queued; those that use them hold two stages or three.
  static constexpr int kLag = kStages / 4;
  static constexpr bool kTurns = kConsumers == 2;
};

// A tile [kTileKeys, kDim] as products read it: panels of 64 dimensions, in which a key has 128
// bytes.
template <int kDim>
struct PanelLayout {
  static constexpr int kPieces = kDim / 8;
  static constexpr int kPanelBytes = kTileKeys * 128;
  static constexpr int kBytes = kTileKeys * kDim * 2;
  __device__ static __forceinline__ uint32_t place(uint32_t tile, int key, int piece) {
    return tile +
           static_cast<uint32_t>(piece / 8 * kPanelBytes + key * 128 + (piece % 8 ^ key % 8) * 16);
  }
};

// What lies where in shared memory.
template <class P>
struct Shared {
  using Layout = PanelLayout<P::kDim>;
  static constexpr int kStageBytes = 2 * Layout::kBytes;
  static constexpr int kQueries = P::kStages * kStageBytes;
  static constexpr int kTotals = kQueries + P::kConsumers * Layout::kBytes;
  static constexpr int kItems =
      kTotals + P::kConsumers * kPartRows * P::kDim * static_cast<int>(sizeof(float));
  static constexpr int kBarriers = kItems + (P::kStages + 2) * static_cast<int>(sizeof(Item));
  static constexpr int kBytes = kBarriers + (2 * P::kStages + 1) * 8;

  char* memory;

  __device__ __forceinline__ uint32_t base() const {
    return static_cast<uint32_t>(__cvta_generic_to_shared(memory));
  }
  __device__ __forceinline__ uint32_t keys(uint32_t stage) const {
    return base() + stage * kStageBytes;
  }
  __device__ __forceinline__ uint32_t values(uint32_t stage) const {
    return keys(stage) + Layout::kBytes;
  }
  __device__ __forceinline__ uint32_t queries(int consumer) const {
    return base() + kQueries + consumer * Layout::kBytes;
  }
  __device__ __forceinline__ float4* totals() const {
    return reinterpret_cast<float4*>(memory + kTotals);
  }
  // The item that begins with the tile in a stage.
  __device__ __forceinline__ Item& item(uint32_t stage) const {
    return reinterpret_cast<Item*>(memory + kItems)[stage];
  }
  // Items that the search has found, in turn.
  __device__ __forceinline__ Item& found(int turn) const { return item(P::kStages + turn); }
  __device__ __forceinline__ uint32_t filled(uint32_t stage) const {
    return base() + kBarriers + stage * 8;
  }
  __device__ __forceinline__ uint32_t emptied(uint32_t stage) const {
    return filled(P::kStages + stage);
  }
  __device__ __forceinline__ uint32_t queries_read() const { return filled(2 * P::kStages); }
};

// The stage of a tile, and the parity of the stage's use by it.
template <class P>
struct Turn {
  uint32_t stage = 0, parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == P::kStages) stage = 0, parity ^= 1;
  }
};

// ---------------------------------------------------------------------------------------------
// The warpgroup that copies

template <class P>
struct Producer {
  using Layout = PanelLayout<P::kDim>;
  using Copies = TileCopies<P::kDim, warpgroup::kThreads, Layout>;
  static constexpr int kBarrier = 1;

  const Attention& attention;
  const Items& items;
  const Shared<P>& shared;
  Turn<P> turn, shown;
  int queued = 0;  // tiles that are not shown yet

  // Shows the oldest tile, whose copies have ended, to those that compute.
  __device__ __forceinline__ void show() {
    warpgroup::show_to_products();
    warpgroup::arrive(shared.filled(shown.stage));
    shown.next();
  }
  __device__ __forceinline__ void show_all() {
    wait_for_copies<0>();
    for (; queued > 0; --queued) show();
  }

  __device__ __forceinline__ void queue_queries(const Item& item) {
    const int head_dim = static_cast<int>(attention.sizes.head_dim);
    const int my_row = threadIdx.x / Layout::kPieces, my_piece = threadIdx.x % Layout::kPieces;
    const bool by_heads = items.heads_at_once > 1;
#pragma unroll 1
    for (int consumer = 0; consumer < P::kConsumers; ++consumer) {
      const int offset = by_heads ? 0 : consumer * kPartRows;
      const int head = item.head + (by_heads ? consumer : 0);
      const Bf16* from = static_cast<const Bf16*>(attention.q) + head * head_dim + my_piece * 8;
#pragma unroll 4
      for (int row = my_row; row < kPartRows; row += Copies::kKeys) {
        const bool there = offset + row < item.rows && my_piece * 8 < head_dim;
        const int64_t at = item.first_row + offset + row;
        copy_piece(Layout::place(shared.queries(consumer), row, my_piece),
                   there ? from + at * attention.q_stride : attention.q, there);
      }
    }
  }

  __device__ __forceinline__ void run(const AttentionTile* tiles) {
    const int group = static_cast<int>(attention.sizes.query_heads / attention.sizes.kv_heads);
    ItemSearch search(attention, tiles, items);
    uint32_t queries_parity = 1;
    int found = 0, tiles_before = P::kLag + 1;  // of the item before
    while (true) {
      if (threadIdx.x == 0) {
        while (!search.found()) search.advance();
        shared.found(found) = search.item();
        search.begin();
      }
      warpgroup::synchronize<warpgroup::kThreads>(kBarrier);
      const Item item = shared.found(found);
      found ^= 1;
      if (item.rows == 0) break;
      const int end = item.position + item.rows;
      Copies copies(attention, places_of(attention, item.first_row), item.head / group, 0, end);
      for (int first = 0; first < end; first += kTileKeys) {
        warpgroup::wait(shared.emptied(turn.stage), turn.parity ^ 1);
        if (first == 0) {
          // Queries are read with the first tile: it must be shown before the next ones come.
          if (tiles_before <= P::kLag) show_all();
          tiles_before = (end + kTileKeys - 1) / kTileKeys;
          if (threadIdx.x == 0) shared.item(turn.stage) = item;
          warpgroup::wait(shared.queries_read(), queries_parity);
          queries_parity ^= 1;
          queue_queries(item);
        }
        copies.queue(first, shared.keys(turn.stage));
        end_of_copies();
        copies.read_pages(first + kTileKeys);
        turn.next();
        if (queued < P::kLag) {
          ++queued;
        } else {
          wait_for_copies<P::kLag>();
          show();
        }
        if (threadIdx.x == 0) search.advance();
      }
    }
    show_all();
    warpgroup::wait(shared.emptied(turn.stage), turn.parity ^ 1);
    if (threadIdx.x == 0) {
      shared.item(turn.stage).rows = 0;
      end_search(attention);
    }
    show();
  }
};

// ---------------------------------------------------------------------------------------------
// The warpgroups that compute

// Lane t of four gets the t-th word of each: words[i] of lane t becomes words[t] of lane i.
__device__ __forceinline__ void turn_words(uint32_t (&words)[4]) {
  const int lane = threadIdx.x % 4;
  const bool odd = lane % 2 != 0, upper = lane >= 2;
  const uint32_t a = __shfl_xor_sync(kAllLanes, odd ? words[0] : words[1], 1);
  const uint32_t b = __shfl_xor_sync(kAllLanes, odd ? words[2] : words[3], 1);
  const uint32_t p[2] = {odd ? a : words[0], odd ? words[1] : a};
  const uint32_t q[2] = {odd ? b : words[2], odd ? words[3] : b};
  const uint32_t c = __shfl_xor_sync(kAllLanes, upper ? p[0] : q[0], 2);
  const uint32_t d = __shfl_xor_sync(kAllLanes, upper ? p[1] : q[1], 2);
  words[0] = upper ? c : p[0], words[1] = upper ? d : p[1];
  words[2] = upper ? q[0] : c, words[3] = upper ? q[1] : d;
}

// Writes row r of a lane's two, if it is `there`, 16 bytes at a time.
template <int kDim>
__device__ __forceinline__ void write_pieces(const ChunkState<kDim>& state, int r, int head_dim,
                                             bool there, Bf16* out) {
  const float inverse = __frcp_rn(state.sum[r]);
#pragma unroll
  for (int n = 0; n < kDim / 8; n += 4) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] = pair_of(__fmul_rn(state.out[n + i][2 * r], inverse),
                         __fmul_rn(state.out[n + i][2 * r + 1], inverse));
    }
    turn_words(words);
    const int at = (n + static_cast<int>(threadIdx.x) % 4) * 8;
    if (there && at < head_dim) {
      *reinterpret_cast<uint4*>(out + at) = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

template <class P>
struct Consumer {
  using Layout = PanelLayout<P::kDim>;
  using Scores = float[kTileKeys / 8][4];
  using Weights = uint32_t[kTileKeys / 16][4];
  using ChunkTotal = Total<P::kDim, P::kConsumers * warpgroup::kThreads>;
  static constexpr int kTurnBarrier = 2;

  const Attention& attention;
  const Items& items;
  const Shared<P>& shared;
  float scale;
  int consumer;  // which
  int warp, lane;
  Turn<P> turn;      // of the next tile
  Turn<P> released;  // of the oldest that is in use
  uint32_t queries[P::kDim / 16][4];
  ChunkState<P::kDim> state;
  int last[2];
  bool in_turn;

  __device__ __forceinline__ void wait_for_tile() {
    warpgroup::wait(shared.filled(turn.stage), turn.parity);
  }
  __device__ __forceinline__ void release_tile() {
    __syncwarp();
    if (lane == 0) warpgroup::arrive(shared.emptied(released.stage));
    released.next();
  }
  __device__ __forceinline__ void read_queries() {
    const int row = warp * 16 + lane % 16;
#pragma unroll
    for (int k = 0; k < P::kDim / 16; ++k) {
      load_matrices(queries[k], Layout::place(shared.queries(consumer), row, 2 * k + lane / 16));
    }
    warpgroup::arrive(shared.queries_read());  // each lane for what it has read itself
  }
  // The scores of the next tile.
  __device__ __forceinline__ void queue_scores(Scores& scores) {
    const uint32_t keys = shared.keys(turn.stage);
    warpgroup::begin_products();
#pragma unroll
    for (int k = 0; k < P::kDim / 16; ++k) {
      const uint32_t columns = keys + k / 4 * Layout::kPanelBytes + k % 4 * 32;
      warpgroup::multiply_add<false>(scores, queries[k], warpgroup::matrix(columns, 16), k > 0);
    }
    warpgroup::end_products();
    turn.next();
  }
  // Adds the weighted values of the oldest tile.
  __device__ __forceinline__ void queue_values(const Weights& weights) {
    const uint32_t values = shared.values(released.stage);
    warpgroup::begin_products();
#pragma unroll
    for (int k = 0; k < kTileKeys / 16; ++k) {
      warpgroup::multiply_add<true>(state.out, weights[k],
                                    warpgroup::matrix(values + k * 2048, Layout::kPanelBytes), 1);
    }
    warpgroup::end_products();
  }

  // Consumers with as many tiles each queue their products in turn: one's run while the others
  // compute weights.
  __device__ __forceinline__ void begin_turn() {
    warpgroup::synchronize<2 * warpgroup::kThreads>(kTurnBarrier + consumer);
  }
  __device__ __forceinline__ void end_turn() {
    warpgroup::announce<2 * warpgroup::kThreads>(kTurnBarrier + (consumer + 1) % P::kConsumers);
  }

  // Tiles 0 .. count - 1, of which the first is there. A tile's scores and its predecessor's values
  // are computed at once, and its weights while the values still are.
  __device__ __forceinline__ void attend(int count, ChunkTotal& total) {
    Scores scores;
    Weights weights;
    float shrink[2];
    state.clear();
    queue_scores(scores);
    warpgroup::wait_for_products<0>(scores);
    weigh_tile(scores, 0, last, scale, state.most, state.sum, shrink);
    pack_weights(scores, weights);
    for (int tile = 1; tile < count; ++tile) {
      const int first = tile * kTileKeys;
      wait_for_tile();
      if (in_turn) begin_turn();
      queue_scores(scores);
      queue_values(weights);
      if (in_turn) end_turn();
      warpgroup::wait_for_products<1>(scores);
      if (begins_chunk(first)) {
        warpgroup::wait_for_products<0>(state.out);
        total.join(state, first == kChunkKeys, false, scale);
        state.clear();
      }
      weigh_tile(scores, first, last, scale, state.most, state.sum, shrink);
      warpgroup::finish_before_wait(state.sum[0], state.sum[1], shared.base());
      warpgroup::wait_for_products<0>(state.out);
      release_tile();
      pack_weights(scores, weights);
      shrink_out(state, shrink);
    }
    queue_values(weights);
    warpgroup::wait_for_products<0>(state.out);
    release_tile();
    total.join(state, count * kTileKeys <= kChunkKeys, true, scale);
  }

  __device__ __forceinline__ void run(ChunkTotal& total) {
    in_turn = P::kTurns && items.heads_at_once > 1;
    if (in_turn && consumer == P::kConsumers - 1) end_turn();
    while (attend_item(total)) {
    }
    if (in_turn && consumer == 0) begin_turn();
  }

  // The next item; false if there is none.
  __device__ __forceinline__ bool attend_item(ChunkTotal& total) {
    wait_for_tile();
    // Branches on what a lane broadcasts are known not to divide the warp; products need that.
    const Item stored = lane == 0 ? shared.item(turn.stage) : Item{};
    const int item_rows = __shfl_sync(kAllLanes, stored.rows, 0);
    if (item_rows == 0) return false;
    const int item_position = __shfl_sync(kAllLanes, stored.position, 0);
    const int item_first_row = __shfl_sync(kAllLanes, stored.first_row, 0);
    const int item_head = __shfl_sync(kAllLanes, stored.head, 0);
    const bool by_heads = items.heads_at_once > 1;
    const int head = item_head + (by_heads ? consumer : 0);
    const int offset = by_heads ? 0 : consumer * kPartRows;
    const int rows = min(item_rows - offset, kPartRows), position = item_position + offset;
    const int tiles_of_item = (item_position + item_rows + kTileKeys - 1) / kTileKeys;
    const int count = rows <= 0 ? 0 : (position + rows + kTileKeys - 1) / kTileKeys;
    read_queries();
#pragma unroll
    for (int r = 0; r < 2; ++r) last[r] = position + warp * 16 + r * 8 + lane / 4;
    if (count > 0) attend(count, total);
    for (int tile = count; tile < tiles_of_item; ++tile) {
      wait_for_tile();
      turn.next();
      release_tile();
    }

    const int head_dim = static_cast<int>(attention.sizes.head_dim);
    const int heads = static_cast<int>(attention.sizes.query_heads);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int local = warp * 16 + r * 8 + lane / 4;
      const int64_t row = item_first_row + offset + local;
      write_pieces(state, r, head_dim, local < rows,
                   static_cast<Bf16*>(attention.out) + (row * heads + head) * head_dim);
      if (local < rows && attention.lse != nullptr && lane % 4 == 0) {
        attention.lse[row * attention.lse_row + head * attention.lse_head] =
            log_sum(state.most[r], state.sum[r], scale);
      }
    }
    return true;
  }
};

// ---------------------------------------------------------------------------------------------
// Launches

template <class P>
__global__ void __launch_bounds__(P::kThreads, 1)
    warpgroups_kernel(const __grid_constant__ Attention attention, const AttentionTile* tiles,
                      const __grid_constant__ Items items, float scale) {
  extern __shared__ __align__(1024) char memory[];
  const Shared<P> shared{memory};
  if (threadIdx.x == 0) {
    for (uint32_t stage = 0; stage < P::kStages; ++stage) {
      warpgroup::make_barrier(shared.filled(stage), warpgroup::kThreads);
      warpgroup::make_barrier(shared.emptied(stage), P::kConsumers * kWarps);
    }
    warpgroup::make_barrier(shared.queries_read(), P::kConsumers * warpgroup::kThreads);
  }
  __syncthreads();
  const int which = __shfl_sync(kAllLanes, threadIdx.x / warpgroup::kThreads, 0);
  if (which == 0) {
    warpgroup::give_registers<P::kCopyRegisters>();
    Producer<P> producer{attention, items, shared};
    producer.run(tiles);
  } else {
    warpgroup::take_registers<P::kComputeRegisters>();
    Consumer<P> consumer{attention, items, shared, scale, which - 1};
    consumer.warp = threadIdx.x / kWarp % kWarps, consumer.lane = threadIdx.x % kWarp;
    typename Consumer<P>::ChunkTotal total(shared.totals() + threadIdx.x - warpgroup::kThreads);
    consumer.run(total);
  }
}

template <class P>
bool launch(const Attention& attention, const AttentionTile* tiles, int64_t count, float scale,
            cudaStream_t stream) {
  const HeadSizes& sizes = attention.sizes;
  const int64_t group = sizes.query_heads / sizes.kv_heads;
  Items items;
  items.tiles = static_cast<int>(count);
  items.heads_at_once = group % P::kConsumers == 0 ? P::kConsumers : 1;
  items.part_rows = items.heads_at_once > 1 ? kPartRows : static_cast<int>(kAttentionTileRows);
  items.parts = static_cast<int>(kAttentionTileRows) / items.part_rows;
  items.units = static_cast<int>(sizes.query_heads) / items.heads_at_once;
  // Sections cost blocks that have their items beforehand more than the cache gives.
  items.section = items.units;
  if (attention.counters != nullptr) {
    const int64_t of_head = count * kAttentionTileRows * sizes.head_dim * 4;
    const int64_t heads = std::max<int64_t>(kCachedBytes / of_head, 1);
    items.section =
        static_cast<int>(std::min<int64_t>(heads * (group / items.heads_at_once), items.units));
  }
  constexpr int kBytes = Shared<P>::kBytes;
  check_cuda(cudaFuncSetAttribute(warpgroups_kernel<P>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  kBytes),
             "attention, shared memory");
  const int processors = multiprocessors();
  if (2 * items.count() < processors) return false;  // blocks of fewer rows are there sooner
  const int blocks = std::min(items.count(), processors);
  warpgroups_kernel<P><<<blocks, P::kThreads, kBytes, stream>>>(attention, tiles, items, scale);
  check_launch("attention of tiles by warpgroups");
  return true;
}

bool device_has_warpgroups() {
  int device = 0, major = 0, minor = 0;
  check_cuda(cudaGetDevice(&device), "the current device");
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
             "its compute capability");
  check_cuda(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device),
             "its compute capability");
  return major == 9 && minor == 0;
}

}  // namespace

bool attend_tiles_by_warpgroups(const Attention& attention, const AttentionTile* tiles,
                                int64_t count, float scale, cudaStream_t stream) {
  const HeadSizes& sizes = attention.sizes;
  if (sizes.head_dim <= 32 || sizes.head_dim > 128 || !device_has_warpgroups()) return false;
  if (sizes.head_dim > 64) return launch<Plan<128, 2>>(attention, tiles, count, scale, stream);
  if (sizes.query_heads / sizes.kv_heads % 3 == 0) {
    return launch<Plan<64, 3>>(attention, tiles, count, scale, stream);
  }
  return launch<Plan<64, 2>>(attention, tiles, count, scale, stream);
}

}  // namespace leeway::cuda
