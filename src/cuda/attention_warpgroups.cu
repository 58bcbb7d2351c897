#include "cuda/attention_warpgroups.h"

#include <algorithm>

#include "cuda/attention_rows.cuh"
#include "cuda/warpgroup.cuh"

namespace leeway::cuda {
namespace {

#ifndef PLAN_CLOCK
#define PLAN_CLOCK 0
#endif
#if PLAN_CLOCK
#define TICK(i) { const unsigned now_ = clock(); acc[i] += now_ - then; then = now_; }
#else
#define TICK(i)
#endif
#ifndef PLAN_SECTION
#define PLAN_SECTION 2
#endif
#ifndef PLAN_STAGES
#define PLAN_STAGES 4
#endif
#ifndef PLAN_LOCAL
#define PLAN_LOCAL 0
#endif
#ifndef PLAN_LAG
#define PLAN_LAG 1
#endif
#ifndef PLAN_AHEAD
#define PLAN_AHEAD 1
#endif
#ifndef PLAN_CONSUMERS
#define PLAN_CONSUMERS 2
#endif
#ifndef PLAN_PINGPONG
#define PLAN_PINGPONG 0
#endif

constexpr int kPartRows = 64;  // of a warpgroup
constexpr int kConsumers = PLAN_CONSUMERS;
constexpr int kBlockThreads = (1 + kConsumers) * warpgroup::kThreads;
constexpr int kStages = PLAN_STAGES;
constexpr int kLag = PLAN_LAG;
constexpr int kAhead = PLAN_AHEAD;
constexpr bool kPingPong = PLAN_PINGPONG;

// A tile [kTileKeys, kDim] as the products read it: 64 dimensions side by side, 128 bytes for a
// key.
template <int kDim>
struct PanelLayout {
  static constexpr int kPieces = kDim / 8;
  static constexpr int kPanelBytes = kTileKeys * 128;
  static constexpr int kBytes = kTileKeys * kDim * 2;
  __device__ static __forceinline__ uint32_t place(uint32_t tile, int key, int piece) {
    return tile + static_cast<uint32_t>(piece / 8 * kPanelBytes + key * 128 +
                                        (piece % 8 ^ key % 8) * 16);
  }
};

// What a block computes at a time: rows of one tile, for one query head or one for each warpgroup.
struct Item {
  int first_row, rows, position, head;
};

struct Work {
  int tiles, parts, head_units, heads_at_once, section;
};

template <int kDim>
using WarpgroupTotal = Total<kDim, PLAN_LOCAL ? 1 : kConsumers * warpgroup::kThreads>;

template <int kDim>
struct Shared {
  using Layout = PanelLayout<kDim>;
  static constexpr int kStageBytes = 2 * Layout::kBytes;
  static constexpr int kQueries = kStages * kStageBytes;
  static constexpr int kTotals = kQueries + kConsumers * Layout::kBytes;
  static constexpr int kBarriers =
      kTotals + (PLAN_LOCAL ? 0 : kConsumers * kPartRows * kDim * static_cast<int>(sizeof(float)));
  static constexpr int kItems = kBarriers + 192;
  static constexpr int kBytes = kItems + (kStages + 2) * static_cast<int>(sizeof(Item));

  uint32_t base;
  __device__ __forceinline__ uint32_t stage(uint32_t s) const { return base + s * kStageBytes; }
  __device__ __forceinline__ uint32_t queries(int group) const {
    return base + kQueries + group * Layout::kBytes;
  }
  __device__ __forceinline__ uint32_t filled(uint32_t s) const { return base + kBarriers + s * 8; }
  __device__ __forceinline__ uint32_t emptied(uint32_t s) const {
    return base + kBarriers + (kStages + s) * 8;
  }
  __device__ __forceinline__ uint32_t queries_read() const {
    return base + kBarriers + 2 * kStages * 8;
  }
};
static_assert((2 * kStages + 1) * 8 <= 192);

// The stage of the t-th tile and the parity of its use.
struct Turn {
  uint32_t stage = 0, parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

// ---------------------------------------------------------------------------------------------
// The producer

// Finds the block's items, a step at a time between copies, since each step waits for memory. One
// thread does, and leaves what it found in shared memory.
struct Search {
  const Attention& attention;
  const AttentionTile* tiles;
  const Work& work;
  int step = 0, round = 0, index;
  int unit, part;
  AttentionTile tile;
  Item item;

  __device__ __forceinline__ bool found() const { return step == 3; }
  __device__ __forceinline__ void begin() { step = 0; }
  __device__ __forceinline__ void advance() {
    if (step == 0) {
      if (attention.counters != nullptr) {
        index = atomicAdd(attention.counters, 1);
      } else {
        // Every other round backwards: what is longest in one is shortest in the next.
        const int blocks = gridDim.x, block = blockIdx.x;
        index = round * blocks + (round % 2 == 0 ? block : blocks - 1 - block);
        ++round;
      }
      step = 1;
    } else if (step == 1) {
      const int units = work.tiles * work.parts, of_section = units * work.section;
      item.rows = 0;
      step = 3;
      if (index >= units * work.head_units) {
        if (attention.counters == nullptr && round * static_cast<int>(gridDim.x) <
            units * work.head_units) step = 0;
        return;
      }
      const int section = index / of_section, rest = index % of_section;
      const int width = min(work.section, work.head_units - section * work.section);
      const int of_tiles = rest / width;
      part = work.parts - 1 - of_tiles % work.parts;
      item.head = (section * work.section + rest % width) * work.heads_at_once;
      tile = tiles[of_tiles / work.parts];
      step = 2;
    } else if (step == 2) {
      item.first_row = tile.first_row + part * kPartRows;
      item.rows = tile.rows - part * kPartRows;
      if (work.parts > 1) item.rows = min(item.rows, kPartRows);
      step = 0;
      if (item.rows <= 0) return;
      item.position = attention.places.positions[tile.first_row] + part * kPartRows;
      step = 3;
    }
  }
};

__device__ __forceinline__ void synchronize_producers() {
  asm volatile("bar.sync 1, %0;" ::"n"(warpgroup::kThreads) : "memory");
}

template <int kDim>
__device__ __forceinline__ void produce(const Attention& attention, const AttentionTile* tiles,
                                        const Work& work, const Shared<kDim>& shared, Item* items) {
  using Layout = PanelLayout<kDim>;
  using Copies = TileCopies<kDim, warpgroup::kThreads, Layout>;
  const int head_dim = static_cast<int>(attention.sizes.head_dim);
  const int group = static_cast<int>(attention.sizes.query_heads / attention.sizes.kv_heads);
  const int my_key = threadIdx.x / Layout::kPieces, my_piece = threadIdx.x % Layout::kPieces;
  Turn turn, shown;
  uint32_t queries_parity = 1;
  int queued = 0;
  int of_item = kLag + 1;  // tiles of the item before
  const auto show = [&] {
    warpgroup::show_to_products();
    warpgroup::arrive(shared.filled(shown.stage));
    shown.next();
  };

  Search search{attention, tiles, work};
  Item* next = items + kStages;
  while (true) {
    if (threadIdx.x == 0) {
      while (!search.found()) search.advance();
      *next = search.item;
      search.begin();
    }
    synchronize_producers();
    const Item item = *next;
    next = items + kStages + (next == items + kStages ? 1 : 0);
    if (item.rows <= 0) break;
    const int end = item.position + item.rows;
    Copies copies(attention, places_of(attention, item.first_row), item.head / group, 0, end);
    for (int first = 0; first < end; first += kTileKeys) {
      warpgroup::wait(shared.emptied(turn.stage), turn.parity ^ 1);
      if (first == 0) {
        // The queries before are read once their first tile is shown.
        if (of_item <= kLag) {
          wait_for_copies<0>();
          for (; queued > 0; --queued) show();
        }
        of_item = (end + kTileKeys - 1) / kTileKeys;
        if (threadIdx.x == 0) items[turn.stage] = item;
        warpgroup::wait(shared.queries_read(), queries_parity);
        queries_parity ^= 1;
#pragma unroll 1
        for (int g = 0; g < kConsumers; ++g) {
          const int first_local = work.heads_at_once > 1 ? 0 : g * kPartRows;
          const int head = item.head + (work.heads_at_once > 1 ? g : 0);
          const Bf16* from = static_cast<const Bf16*>(attention.q) + head * head_dim + my_piece * 8;
#pragma unroll 4
          for (int i = 0; i < kPartRows / Copies::kKeys; ++i) {
            const int row = my_key + i * Copies::kKeys;
            const bool there = first_local + row < item.rows && my_piece * 8 < head_dim;
            const int64_t at = item.first_row + first_local + row;
            copy_piece(Layout::place(shared.queries(g), row, my_piece),
                       there ? from + at * attention.q_stride : attention.q, there);
          }
        }
      }
      copies.queue(first, shared.stage(turn.stage));
      end_of_copies();
      copies.read_pages(first + kTileKeys);
      turn.next();
      if (queued < kLag) {
        ++queued;
      } else {
        wait_for_copies<kLag>();
        show();
      }
      if (threadIdx.x == 0) search.advance();
    }
  }
  wait_for_copies<0>();
  for (; queued > 0; --queued) show();
  warpgroup::wait(shared.emptied(turn.stage), turn.parity ^ 1);
  if (threadIdx.x == 0) {
    items[turn.stage].rows = 0;
    __threadfence();
    if (attention.counters != nullptr &&
        atomicAdd(attention.counters + 1, 1) == static_cast<int>(gridDim.x) - 1) {
      attention.counters[0] = attention.counters[1] = 0;
    }
  }
  show();
}

// ---------------------------------------------------------------------------------------------
// The consumers

// Lane t of four gets the t-th word of each of them: words[i] of lane t becomes words[t] of lane i.
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

// Writes row r of a lane's two, 16 bytes at a time.
template <int kDim>
__device__ __forceinline__ void write_pieces(const ChunkState<kDim>& state, int r, int head_dim,
                                             Bf16* out, bool there) {
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

template <int kDim>
struct Consumer {
  using Layout = PanelLayout<kDim>;
  const Shared<kDim>& shared;
  const Attention& attention;
  const Work& work;
  float scale;
  int group, warp, lane;
  Turn turn, released;

  uint32_t queries[kDim / 16][4];
  ChunkState<kDim> state;
  int last[2];
#if PLAN_CLOCK
  unsigned acc[10], then;
#endif

  __device__ __forceinline__ void release() {
    __syncwarp();
    if (lane == 0) warpgroup::arrive(shared.emptied(released.stage));
    released.next();
  }
  __device__ __forceinline__ void read_queries() {
    const int row = warp * 16 + lane % 16;
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      load_matrices(queries[k], Layout::place(shared.queries(group), row, 2 * k + lane / 16));
    }
    __syncwarp();
    if (lane == 0) warpgroup::arrive(shared.queries_read());
  }
  // Scores of the next tile.
  __device__ __forceinline__ void queue_scores(float (&scores)[kTileKeys / 8][4]) {
    const uint32_t keys = shared.stage(turn.stage);
    warpgroup::begin_products();
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      warpgroup::multiply_add<false>(
          scores, queries[k],
          warpgroup::matrix(keys + k / 4 * Layout::kPanelBytes + k % 4 * 32, 16), k > 0);
    }
    warpgroup::end_products();
  }
  __device__ __forceinline__ void queue_values(const uint32_t (&weights)[kTileKeys / 16][4],
                                               uint32_t stage) {
    const uint32_t values = shared.stage(stage) + Layout::kBytes;
    warpgroup::begin_products();
#pragma unroll
    for (int k = 0; k < kTileKeys / 16; ++k) {
      warpgroup::multiply_add<true>(
          state.out, weights[k], warpgroup::matrix(values + k * 2048, Layout::kPanelBytes), 1);
    }
    warpgroup::end_products();
  }
  __device__ __forceinline__ void wait_filled() {
    warpgroup::wait(shared.filled(turn.stage), turn.parity);
  }

  // scheme 2: scores of tile j are there, its predecessor's values may be in flight
  template <bool kLast>
  __device__ __forceinline__ void step(float (&scores)[8][4], float (&next)[8][4],
                                       uint32_t (&weights)[4][4], int j, WarpgroupTotal<kDim>& total,
                                       bool flying) {
    if constexpr (!kLast) {
      wait_filled();
      queue_scores(next);
      turn.next();
    }
    const int first = j * kTileKeys;
    if (j > 0 && begins_chunk(first)) {
      warpgroup::wait_for_products<0>(state.out);
      total.join(state, first == kChunkKeys, false, scale);
      state.clear();
    }
    float shrink[2];
    weigh_tile(scores, first, last, scale, state.most, state.sum, shrink);
    warpgroup::settle(state.sum[0], state.sum[1], shared.base);
    warpgroup::wait_for_products<0>(state.out);
    if constexpr (!kLast) warpgroup::wait_for_products<0>(next);
    if (flying) release();
    pack_weights(scores, weights);
    shrink_out(state, shrink);
    if constexpr (!kLast && kAhead == 3) {
#pragma unroll
      for (int i = 0; i < 32; ++i) scores[i / 4][i % 4] = next[i / 4][i % 4];
    }
    queue_values(weights, released.stage);
  }

  __device__ __forceinline__ bool run(const Item* items, WarpgroupTotal<kDim>& total) {
    wait_filled();
    Item item = items[turn.stage];
    item.first_row = __shfl_sync(kAllLanes, item.first_row, 0);
    item.rows = __shfl_sync(kAllLanes, item.rows, 0);
    item.position = __shfl_sync(kAllLanes, item.position, 0);
    item.head = __shfl_sync(kAllLanes, item.head, 0);
    if (item.rows == 0) return false;
    const int first_local = work.heads_at_once > 1 ? 0 : group * kPartRows;
    const int head = item.head + (work.heads_at_once > 1 ? group : 0);
    const int rows = item.rows - first_local;
    const int position = item.position + first_local;
    const int all = (item.position + item.rows + kTileKeys - 1) / kTileKeys;
    const int count = rows <= 0 ? 0 : (position + min(rows, kPartRows) + kTileKeys - 1) / kTileKeys;
    read_queries();
    int local[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      local[r] = warp * 16 + r * 8 + lane / 4;
      last[r] = position + local[r];
    }
    if (count > 0) {
      state.clear();
      if constexpr (kAhead >= 2) {
        float one[8][4], other[8][4];
        uint32_t weights[4][4];
        int j = 0;
        if constexpr (kAhead == 2) {
          if (count % 2 == 0) {
            float shrink[2];
            queue_scores(one);
            turn.next();
            warpgroup::wait_for_products<0>(one);
            weigh_tile(one, 0, last, scale, state.most, state.sum, shrink);
            pack_weights(one, weights);
            queue_values(weights, released.stage);
            warpgroup::wait_for_products<0>(state.out);
            release();
            wait_filled();
            j = 1;
          }
        }
        queue_scores(one);
        turn.next();
        warpgroup::wait_for_products<0>(one);
        if constexpr (kAhead == 2) {
          bool flying = false;
          for (; j + 1 < count; j += 2) {
            step<false>(one, other, weights, j, total, flying);
            step<false>(other, one, weights, j + 1, total, true);
            flying = true;
          }
          step<true>(one, other, weights, j, total, flying);
        } else {
          for (; j + 1 < count; ++j) step<false>(one, other, weights, j, total, j > 0);
          step<true>(one, other, weights, j, total, j > 0);
        }
        warpgroup::wait_for_products<0>(state.out);
        release();
      } else if constexpr (kAhead == 1) {
        float scores[8][4], shrink[2];
        uint32_t weights[4][4];
        queue_scores(scores);
        turn.next();
        warpgroup::wait_for_products<0>(scores);
        weigh_tile(scores, 0, last, scale, state.most, state.sum, shrink);
        pack_weights(scores, weights);
        for (int j = 1; j < count; ++j) {
          const int first = j * kTileKeys;
          wait_filled();
          if constexpr (kPingPong) {
            asm volatile("bar.sync %0, 256;" ::"r"(2 + group) : "memory");
          }
          queue_scores(scores);
          turn.next();
          queue_values(weights, released.stage);
          if constexpr (kPingPong) {
            asm volatile("bar.arrive %0, 256;" ::"r"(2 + (group ^ 1)) : "memory");
          }
          warpgroup::wait_for_products<1>(scores);
          if (begins_chunk(first)) {
            warpgroup::wait_for_products<0>(state.out);
            total.join(state, first == kChunkKeys, false, scale);
            state.clear();
          }
          weigh_tile(scores, first, last, scale, state.most, state.sum, shrink);
          warpgroup::settle(state.sum[0], state.sum[1], shared.base);
          warpgroup::wait_for_products<0>(state.out);
          release();
          pack_weights(scores, weights);
          shrink_out(state, shrink);
        }
        queue_values(weights, released.stage);
        warpgroup::wait_for_products<0>(state.out);
        release();
      } else {
        float scores[8][4], shrink[2];
        uint32_t weights[4][4];
        for (int j = 0; j < count; ++j) {
          const int first = j * kTileKeys;
          wait_filled();
          queue_scores(scores);
          turn.next();
          warpgroup::wait_for_products<0>(scores);
          if (j > 0 && begins_chunk(first)) {
            total.join(state, first == kChunkKeys, false, scale);
            state.clear();
          }
          weigh_tile(scores, first, last, scale, state.most, state.sum, shrink);
          pack_weights(scores, weights);
          shrink_out(state, shrink);
          queue_values(weights, released.stage);
          warpgroup::wait_for_products<0>(state.out);
          release();
        }
      }
      total.join(state, count * kTileKeys <= kChunkKeys, true, scale);
    }
    for (int j = count; j < all; ++j) {
      wait_filled();
      turn.next();
      release();
    }
    const int head_dim = static_cast<int>(attention.sizes.head_dim);
    const int heads = static_cast<int>(attention.sizes.query_heads);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool there = local[r] < rows;
      const int64_t row = item.first_row + first_local + local[r];
      write_pieces(state, r, head_dim,
                   static_cast<Bf16*>(attention.out) + (row * heads + head) * head_dim, there);
      if (there && attention.lse != nullptr && lane % 4 == 0) {
        attention.lse[row * attention.lse_row + head * attention.lse_head] =
            log_sum(state.most[r], state.sum[r], scale);
      }
    }
    return true;
  }
};

template <int kDim>
__global__ void __launch_bounds__(kBlockThreads, 1)
    warpgroups_kernel(const __grid_constant__ Attention attention, const AttentionTile* tiles,
                      const __grid_constant__ Work work, float scale) {
  extern __shared__ __align__(1024) char memory[];
  const Shared<kDim> shared{static_cast<uint32_t>(__cvta_generic_to_shared(memory))};
  auto* items = reinterpret_cast<Item*>(memory + Shared<kDim>::kItems);
  if (threadIdx.x == 0) {
    for (uint32_t s = 0; s < kStages; ++s) {
      warpgroup::make_barrier(shared.filled(s), warpgroup::kThreads);
      warpgroup::make_barrier(shared.emptied(s), kConsumers * 4);
    }
    warpgroup::make_barrier(shared.queries_read(), kConsumers * 4);
  }
  __syncthreads();
  const int role = __shfl_sync(kAllLanes, threadIdx.x / warpgroup::kThreads, 0);
  if (role == 0) {
    warpgroup::give_registers<kConsumers == 2 ? 40 : 32>();
    produce<kDim>(attention, tiles, work, shared, items);
  } else {
    warpgroup::take_registers<kConsumers == 2 ? 232 : 160>();
    Consumer<kDim> consumer{shared, attention, work, scale};
    consumer.group = role - 1;
    consumer.warp = threadIdx.x / kWarp % 4;
    consumer.lane = threadIdx.x % kWarp;
    if (kPingPong && consumer.group == 1) {
      asm volatile("bar.arrive %0, 256;" ::"r"(2) : "memory");
    }
#if PLAN_LOCAL
    float4 pieces[kDim / 8];
    WarpgroupTotal<kDim> total(pieces + unknown_zero());
#else
    WarpgroupTotal<kDim> total(reinterpret_cast<float4*>(memory + Shared<kDim>::kTotals) +
                               threadIdx.x - warpgroup::kThreads);
#endif
    while (consumer.run(items, total)) {
    }
    if (kPingPong && consumer.group == 0) {
      asm volatile("bar.sync %0, 256;" ::"r"(2) : "memory");
    }
  }
}

template <int kDim>
void launch(const Attention& attention, const AttentionTile* tiles, const Work& work, float scale,
            cudaStream_t stream) {
  constexpr int kBytes = Shared<kDim>::kBytes;
  check_cuda(cudaFuncSetAttribute(warpgroups_kernel<kDim>,
                                  cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
             "attention, shared memory");
  const int all = work.tiles * work.parts * work.head_units;
  const int blocks = std::min(all, multiprocessors());
  warpgroups_kernel<kDim><<<blocks, kBlockThreads, kBytes, stream>>>(attention, tiles, work, scale);
}

}  // namespace

bool attend_tiles_by_warpgroups(const Attention& attention, const AttentionTile* tiles,
                                int64_t count, float scale, cudaStream_t stream) {
  const HeadSizes& sizes = attention.sizes;
  if (sizes.head_dim <= 32 || sizes.head_dim > 128) return false;
  const int group = static_cast<int>(sizes.query_heads / sizes.kv_heads);
  Work work;
  if (sizes.head_dim > 64 && Shared<128>::kBytes > 232448) return false;
  if (kConsumers == 3 && (sizes.head_dim > 64 || group % 3 != 0)) return false;
  if (kPingPong && group % kConsumers != 0) return false;
  work.tiles = static_cast<int>(count);
  work.heads_at_once = group % kConsumers == 0 ? kConsumers : 1;
  work.parts = work.heads_at_once > 1 ? static_cast<int>(kAttentionTileRows) / kPartRows : 1;
  work.head_units = static_cast<int>(sizes.query_heads) / work.heads_at_once;
  work.section = PLAN_SECTION;
  if (sizes.head_dim <= 64) {
    launch<64>(attention, tiles, work, scale, stream);
  } else {
    if constexpr (kConsumers == 2) launch<128>(attention, tiles, work, scale, stream);
  }
  check_launch("attention of tiles by warpgroups");
  return true;
}

}  // namespace leeway::cuda
