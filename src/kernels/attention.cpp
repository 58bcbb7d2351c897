#include "kernels/attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "base/aligned.h"
#include "leeway/error.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/attention.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "kernels/vectors-inl.h"

#ifndef LEEWAY_KERNELS_ATTENTION_SHARED_
#define LEEWAY_KERNELS_ATTENTION_SHARED_
namespace leeway {

constexpr int64_t kTile = 8;  // queries that share each load of a key or value

// Queries of one key/value head: query i sees `keys[i]` keys. All pointers are to one head.
struct QueryTile {
  int64_t count = 0;
  const float* q[kTile];
  float* out[kTile];
  float* log_sum[kTile];  // null if not wanted
  int64_t keys[kTile];
  int64_t most_keys = 0;
};

struct BackwardTile {
  int64_t count = 0;
  const float *q[kTile], *out[kTile], *dout[kTile];
  float* dq[kTile];
  float log_sum[kTile];
  int64_t keys[kTile];
  int64_t most_keys = 0;
};

// One key/value head of a whole sequence. Rows of keys and values are `ldk` and `ldv` apart.
struct BackwardHead {
  int64_t dim;
  const float* k;
  int64_t ldk;
  float *dk, *dv;
  int64_t lddk, lddv;
  const float *k_blocks, *v_blocks;  // both transposed in blocks: [dim][16]
};

}  // namespace leeway
#endif

HWY_BEFORE_NAMESPACE();
namespace leeway {
namespace HWY_NAMESPACE {

// Lanes run over keys: a block of 16 is one or several vectors.
using K = hn::CappedTag<float, kBlockKeys>;

// scores[i][key] = q_i . k for B transposed blocks [dim][16], each one a chain of FMAs over dim.
// With few queries, several blocks are computed at once to hide the latency of each chain.
template <int N, int B>
HWY_INLINE void block_scores(const float* const* q, const float* const* blocks, int64_t dim,
                             float* scores, int64_t stride) {
  const K d;
  const int64_t step = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t key = 0; key < kBlockKeys; key += step) {
    hn::Vec<K> sum[N][B];
    for (int i = 0; i < N; ++i) {
      for (int b = 0; b < B; ++b) sum[i][b] = hn::Zero(d);
    }
    for (int64_t j = 0; j < dim; ++j) {
      for (int b = 0; b < B; ++b) {
        const auto k = hn::LoadU(d, blocks[b] + j * kBlockKeys + key);
        for (int i = 0; i < N; ++i) sum[i][b] = hn::MulAdd(hn::Set(d, q[i][j]), k, sum[i][b]);
      }
    }
    for (int i = 0; i < N; ++i) {
      for (int b = 0; b < B; ++b) {
        hn::StoreU(sum[i][b], d, scores + i * stride + b * kBlockKeys + key);
      }
    }
  }
}

template <int N = kTile>
HWY_INLINE void tile_scores(int64_t count, const float* const* q, const float* const* blocks,
                            int64_t block_count, int64_t dim, float* scores, int64_t stride) {
  if (count != N) {
    if constexpr (N > 1) tile_scores<N - 1>(count, q, blocks, block_count, dim, scores, stride);
    return;
  }
  constexpr int kBlocks = N == 1 ? 8 : N == 2 ? 4 : N <= 4 ? 2 : 1;
  int64_t b = 0;
  for (; b + kBlocks <= block_count; b += kBlocks) {
    block_scores<N, kBlocks>(q, blocks + b, dim, scores + b * kBlockKeys, stride);
  }
  for (; b < block_count; ++b) {
    block_scores<N, 1>(q, blocks + b, dim, scores + b * kBlockKeys, stride);
  }
}

// rows[i][0 .. dim) += sum over j = 0 .. n-1, in order, of factor[i * stride + j * step] *
// values[j].
struct WeightedSum {
  float* const* rows;
  const float* factor;
  int64_t stride, step;
  const float* const* values;
  int64_t n, dim;
};

template <int N>
HWY_INLINE void add_weighted_rows(const WeightedSum& w) {
  for_pieces(w.dim, [&](auto d, int64_t at) HWY_ATTR {
    hn::Vec<decltype(d)> sum[N];
    for (int i = 0; i < N; ++i) sum[i] = hn::LoadU(d, w.rows[i] + at);
    for (int64_t j = 0; j < w.n; ++j) {
      const auto v = hn::LoadU(d, w.values[j] + at);
      const float* factor = w.factor + j * w.step;
      for (int i = 0; i < N; ++i) sum[i] = hn::MulAdd(hn::Set(d, factor[i * w.stride]), v, sum[i]);
    }
    for (int i = 0; i < N; ++i) hn::StoreU(sum[i], d, w.rows[i] + at);
  });
}

template <int N = kTile>
HWY_INLINE void add_weighted(int64_t count, const WeightedSum& w) {
  if (count == N) {
    add_weighted_rows<N>(w);
  } else if constexpr (N > 1) {
    add_weighted<N - 1>(count, w);
  }
}

// out_i[at .. at + P vectors) = sum over the first `keys` keys, in order, of factor[i][key] *
// value.
template <int N, int P>
HWY_INLINE void sum_values(float* const* out, const float* factor, int64_t stride,
                           const float* const* values, int64_t keys, int64_t dim, int64_t at) {
  const D d;
  V sum[N][P];
  for (int i = 0; i < N; ++i) {
    for (int p = 0; p < P; ++p) sum[i][p] = hn::Zero(d);
  }
  for (int64_t key = 0; key < keys; ++key) {
    const float* value = values[key / kBlockKeys] + key % kBlockKeys * dim + at;
    for (int p = 0; p < P; ++p) {
      const V v = hn::LoadU(d, value + p * lanes());
      for (int i = 0; i < N; ++i) {
        sum[i][p] = hn::MulAdd(hn::Set(d, factor[i * stride + key]), v, sum[i][p]);
      }
    }
  }
  for (int i = 0; i < N; ++i) {
    for (int p = 0; p < P; ++p) hn::StoreU(sum[i][p], d, out[i] + at + p * lanes());
  }
}

template <int N = kTile>
HWY_INLINE void tile_values(int64_t count, float* const* out, const float* factor, int64_t stride,
                            const float* const* values, int64_t keys, int64_t dim) {
  if (count != N) {
    if constexpr (N > 1) tile_values<N - 1>(count, out, factor, stride, values, keys, dim);
    return;
  }
  constexpr int kPieces = N <= 4 ? 4 : 2;
  int64_t at = 0;
  for (; at + kPieces * lanes() <= dim; at += kPieces * lanes()) {
    sum_values<N, kPieces>(out, factor, stride, values, keys, dim, at);
  }
  for (; at + 2 * lanes() <= dim; at += 2 * lanes()) {
    sum_values<N, 2>(out, factor, stride, values, keys, dim, at);
  }
  for (; at + lanes() <= dim; at += lanes()) {
    sum_values<N, 1>(out, factor, stride, values, keys, dim, at);
  }
  if (at == dim) return;
  // The remainder, narrower than a vector.
  float* rest[N];
  for (int i = 0; i < N; ++i) {
    rest[i] = out[i] + at;
    std::fill_n(rest[i], dim - at, 0.0f);
  }
  for (int64_t first = 0; first < keys; first += kBlockKeys) {
    const int64_t n = std::min(kBlockKeys, keys - first);
    const float* rows[kBlockKeys];
    for (int64_t j = 0; j < n; ++j) rows[j] = values[first / kBlockKeys] + j * dim + at;
    add_weighted_rows<N>({rest, factor + first, stride, 1, rows, n, dim - at});
  }
}

// Scores of the tile, then their exponentials in place and the sums of those, then the weighted
// mean of the values. Keys that a query does not see get exponential 0, which changes no sum, and
// their values are not read; nothing is read beyond the tile's last key. `scores`: [count, stride],
// stride >= most_keys rounded up to a block. `pointers`: room for one per block.
void attend_tile(const QueryTile& t, const float* kv, int64_t block_stride, int64_t head_offset,
                 const int32_t* blocks, int64_t dim, float* scores, int64_t stride,
                 const float** pointers) {
  const D d;
  const int64_t block_count = (t.most_keys + kBlockKeys - 1) / kBlockKeys;
  for (int64_t b = 0; b < block_count; ++b) {
    pointers[b] = kv + blocks[b] * block_stride + head_offset;
    // Prefetch the values: they are needed next, and the hardware prefetcher cannot predict them.
    for (int64_t i = 0; i < kBlockKeys * dim; i += 16) {
      __builtin_prefetch(pointers[b] + kBlockKeys * dim + i, 0, 2);
    }
  }
  tile_scores(t.count, t.q, pointers, block_count, dim, scores, stride);
  float inverse[kTile];
  for (int64_t i = 0; i < t.count; ++i) {
    float* row = scores + i * stride;
    const int64_t padded = block_count * kBlockKeys;
    std::fill(row + t.keys[i], row + padded, -kFloatInfinity);
    V largest = hn::Set(d, -kFloatInfinity);
    for_lanes(padded, [&](int64_t at, int64_t count)
                          HWY_ATTR { largest = hn::Max(largest, load(row + at, count)); });
    const float shift = max_of(largest);
    V sum = hn::Zero(d);
    for_lanes(padded, [&](int64_t at, int64_t count) HWY_ATTR {
      const V e = exp_of(hn::Sub(load(row + at, count), hn::Set(d, shift)));
      store(e, row + at, count);
      sum = hn::Add(sum, e);
    });
    const float total = sum_of(sum);
    inverse[i] = 1.0f / total;
    if (t.log_sum[i] != nullptr) *t.log_sum[i] = shift + std::log(total);
  }
  // First the keys that all queries see; near the diagonal each query then continues to its own
  // last key, since a value it does not see must not reach it (0 times infinity is NaN).
  const int64_t common = *std::min_element(t.keys, t.keys + t.count);
  for (int64_t b = 0; b < block_count; ++b) pointers[b] += kBlockKeys * dim;
  tile_values(t.count, t.out, scores, stride, pointers, common, dim);
  for (int64_t i = 0; i < t.count; ++i) {
    for (int64_t key = common; key < t.keys[i];) {
      const int64_t n = std::min(kBlockKeys - key % kBlockKeys, t.keys[i] - key);
      const float* rows[kBlockKeys];
      for (int64_t j = 0; j < n; ++j) {
        rows[j] = pointers[key / kBlockKeys] + (key % kBlockKeys + j) * dim;
      }
      add_weighted_rows<1>({t.out + i, scores + i * stride + key, stride, 1, rows, n, dim});
      key += n;
    }
    for_lanes(dim, [&](int64_t at, int64_t count) HWY_ATTR {
      store(hn::Mul(load(t.out[i] + at, count), hn::Set(d, inverse[i])), t.out[i] + at, count);
    });
  }
}

// For each block of keys: P = exp(S - log sum), dS = P (dout V^T - dout . out), and the four sums.
void attend_tile_backward(const BackwardTile& t, const BackwardHead& h) {
  const D d;
  HWY_ALIGN float p[kTile * kBlockKeys], ds[kTile * kBlockKeys];
  float dots[kTile];
  for (int64_t i = 0; i < t.count; ++i) {
    V sum = hn::Zero(d);
    for_lanes(h.dim, [&](int64_t at, int64_t count) HWY_ATTR {
      sum = hn::MulAdd(load(t.out[i] + at, count), load(t.dout[i] + at, count), sum);
    });
    dots[i] = sum_of(sum);
  }
  for (int64_t first = 0; first < t.most_keys; first += kBlockKeys) {
    const int64_t n = std::min(kBlockKeys, t.most_keys - first);
    const float *k_block = h.k_blocks + first * h.dim, *v_block = h.v_blocks + first * h.dim;
    tile_scores(t.count, t.q, &k_block, 1, h.dim, p, kBlockKeys);
    tile_scores(t.count, t.dout, &v_block, 1, h.dim, ds, kBlockKeys);
    for (int64_t i = 0; i < t.count; ++i) {
      const int64_t seen = t.keys[i] - first;
      for_lanes(kBlockKeys, [&](int64_t at, int64_t count) HWY_ATTR {
        float* p_at = p + i * kBlockKeys + at;
        float* ds_at = ds + i * kBlockKeys + at;
        const int64_t valid = std::clamp<int64_t>(seen - at, 0, count);
        const auto mask = hn::FirstN(d, static_cast<size_t>(valid));
        const V e =
            hn::IfThenElseZero(mask, exp_of(hn::Sub(load(p_at, count), hn::Set(d, t.log_sum[i]))));
        const V slope = hn::Mul(e, hn::Sub(load(ds_at, count), hn::Set(d, dots[i])));
        store(e, p_at, count);
        store(hn::IfThenElseZero(mask, slope), ds_at, count);
      });
    }
    const float* keys[kBlockKeys];
    for (int64_t j = 0; j < n; ++j) keys[j] = h.k + (first + j) * h.ldk;
    add_weighted(t.count, {t.dq, ds, kBlockKeys, 1, keys, n, h.dim});
    // Gradients of these keys and values: the tile's queries in order.
    for (int64_t key = 0; key < n; key += kTile) {
      float *dk[kTile], *dv[kTile];
      const int64_t count = std::min(kTile, n - key);
      for (int64_t j = 0; j < count; ++j) {
        dk[j] = h.dk + (first + key + j) * h.lddk;
        dv[j] = h.dv + (first + key + j) * h.lddv;
      }
      add_weighted(count, {dv, p + key, 1, kBlockKeys, t.dout, t.count, h.dim});
      add_weighted(count, {dk, ds + key, 1, kBlockKeys, t.q, t.count, h.dim});
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace leeway
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace leeway {

HWY_EXPORT(attend_tile);
HWY_EXPORT(attend_tile_backward);

namespace {

// Work items are runs of queries of one sequence and one key/value head, a few tiles each, so that
// a long sequence is shared by all members.
constexpr int64_t kItemQueries = 8 * kTile;

// Per-thread memory for scores; grows to the longest sequence so far.
float* score_memory(int64_t floats) {
  thread_local AlignedVector<float> memory;
  if (static_cast<int64_t>(memory.size()) < floats) memory.resize(static_cast<size_t>(floats));
  return memory.data();
}

const float** pointer_memory(int64_t count) {
  thread_local std::vector<const float*> memory;
  if (static_cast<int64_t>(memory.size()) < count) memory.resize(static_cast<size_t>(count));
  return memory.data();
}

int64_t blocks_of(int64_t keys) { return (keys + kBlockKeys - 1) / kBlockKeys; }

// Keys or values of one head, transposed in blocks, zero beyond the last.
void transpose_blocks(const float* rows, int64_t ld, int64_t length, int64_t dim, float* blocks) {
  std::fill_n(blocks, blocks_of(length) * kBlockKeys * dim, 0.0f);
  for (int64_t t = 0; t < length; ++t) {
    float* to = blocks + t / kBlockKeys * kBlockKeys * dim + t % kBlockKeys;
    for (int64_t j = 0; j < dim; ++j) to[j * kBlockKeys] = rows[t * ld + j];
  }
}

}  // namespace

void store_kv(Team& team, const HeadLayout& layout, std::span<const SequenceRows> sequences,
              const float* k, const float* v, int64_t ldv, const KvBlocks& kv) {
  const int64_t dim = layout.head_dim;
  team.for_each(static_cast<int64_t>(sequences.size()), [&](int64_t s) {
    const SequenceRows& sequence = sequences[static_cast<size_t>(s)];
    for (int64_t i = 0; i < sequence.rows; ++i) {
      const int64_t position = sequence.first_position + i, slot = position % kBlockKeys;
      float* block = kv.data + sequence.blocks[position / kBlockKeys] * kv.block_stride;
      if (slot == 0) std::fill_n(block, KvBlocks::block_floats(layout), 0.0f);
      const float* k_row = k + (sequence.first_row + i) * layout.kv_width();
      const float* v_row = v + (sequence.first_row + i) * ldv;
      for (int64_t head = 0; head < layout.kv_heads; ++head) {
        float* keys = block + head * 2 * kBlockKeys * dim;
        for (int64_t j = 0; j < dim; ++j) keys[j * kBlockKeys + slot] = k_row[head * dim + j];
        std::memcpy(keys + kBlockKeys * dim + slot * dim, v_row + head * dim,
                    static_cast<size_t>(dim) * sizeof(float));
      }
    }
  });
}

void attend(Team& team, const HeadLayout& layout, std::span<const SequenceRows> sequences,
            const float* q, const KvBlocks& kv, float* out, float* log_sums) {
  const int64_t dim = layout.head_dim, group = layout.query_heads / layout.kv_heads;
  const int64_t rows_per_item = std::max<int64_t>(1, kItemQueries / group);
  // The first work item of each sequence; kept between calls, since decode calls this for every
  // layer.
  thread_local std::vector<int64_t> first_items;
  first_items.assign(1, 0);
  for (const SequenceRows& sequence : sequences) {
    const int64_t runs = (sequence.rows + rows_per_item - 1) / rows_per_item;
    first_items.push_back(first_items.back() + runs * layout.kv_heads);
  }
  const std::span<const int64_t> firsts = first_items;
  team.for_each(firsts.back(), [&](int64_t item) {
    const auto s = static_cast<size_t>(std::upper_bound(firsts.begin(), firsts.end(), item) -
                                       firsts.begin() - 1);
    const int64_t before = firsts[s];
    const SequenceRows& sequence = sequences[s];
    const int64_t head = (item - before) % layout.kv_heads;
    const int64_t first = (item - before) / layout.kv_heads * rows_per_item;
    const int64_t last = std::min(sequence.rows, first + rows_per_item);
    const int64_t stride = blocks_of(sequence.first_position + last) * kBlockKeys;
    float* scores = score_memory(kTile * stride);
    const float** pointers = pointer_memory(stride / kBlockKeys);
    QueryTile tile;
    const auto flush = [&] {
      if (tile.count == 0) return;
      HWY_DYNAMIC_DISPATCH(attend_tile)
      (tile, kv.data, kv.block_stride, head * 2 * kBlockKeys * dim, sequence.blocks, dim, scores,
       stride, pointers);
      tile.count = 0;
    };
    for (int64_t i = first; i < last; ++i) {
      const int64_t row = sequence.first_row + i;
      for (int64_t g = 0; g < group; ++g) {
        const int64_t query_head = head * group + g;
        const int64_t at = row * layout.query_width() + query_head * dim;
        tile.q[tile.count] = q + at;
        tile.out[tile.count] = out + at;
        tile.log_sum[tile.count] =
            log_sums == nullptr ? nullptr : log_sums + row * layout.query_heads + query_head;
        tile.keys[tile.count] = tile.most_keys = sequence.first_position + i + 1;
        if (++tile.count == kTile) flush();
      }
    }
    flush();
  });
}

void attend_backward(Team& team, const HeadLayout& layout, std::span<const SequenceRows> sequences,
                     const float* q, const float* k, const float* v, int64_t ldv, const float* out,
                     const float* dout, const float* log_sums, float* dq, float* dk, float* dv,
                     int64_t lddv) {
  const int64_t dim = layout.head_dim, group = layout.query_heads / layout.kv_heads;
  // Longest first, so that the last item to finish is a short one.
  std::vector<size_t> order(sequences.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return sequences[a].rows > sequences[b].rows; });
  const int64_t items = static_cast<int64_t>(sequences.size()) * layout.kv_heads;
  team.for_each(items, [&](int64_t item) {
    const SequenceRows& sequence = sequences[order[static_cast<size_t>(item / layout.kv_heads)]];
    LEEWAY_CHECK(sequence.first_position == 0, "gradients need whole sequences");
    const int64_t head = item % layout.kv_heads, length = sequence.rows, row = sequence.first_row;
    BackwardHead h{};
    h.dim = dim;
    h.ldk = layout.kv_width(), h.lddk = layout.kv_width(), h.lddv = lddv;
    h.k = k + row * h.ldk + head * dim;
    h.dk = dk + row * h.lddk + head * dim, h.dv = dv + row * lddv + head * dim;
    const int64_t block_floats = blocks_of(length) * kBlockKeys * dim;
    float* blocks = score_memory(2 * block_floats);
    transpose_blocks(h.k, h.ldk, length, dim, blocks);
    transpose_blocks(v + row * ldv + head * dim, ldv, length, dim, blocks + block_floats);
    h.k_blocks = blocks, h.v_blocks = blocks + block_floats;
    for (int64_t t = 0; t < length; ++t) {
      std::fill_n(h.dk + t * h.lddk, dim, 0.0f);
      std::fill_n(h.dv + t * lddv, dim, 0.0f);
    }
    BackwardTile tile;
    const auto flush = [&] {
      if (tile.count > 0) HWY_DYNAMIC_DISPATCH(attend_tile_backward)(tile, h);
      tile.count = 0;
    };
    for (int64_t t = 0; t < length; ++t) {
      for (int64_t g = 0; g < group; ++g) {
        const int64_t query_head = head * group + g;
        const int64_t at = (row + t) * layout.query_width() + query_head * dim;
        std::fill_n(dq + at, dim, 0.0f);
        tile.q[tile.count] = q + at, tile.out[tile.count] = out + at;
        tile.dout[tile.count] = dout + at, tile.dq[tile.count] = dq + at;
        tile.log_sum[tile.count] = log_sums[(row + t) * layout.query_heads + query_head];
        tile.keys[tile.count] = tile.most_keys = t + 1;
        if (++tile.count == kTile) flush();
      }
    }
    flush();
  });
}

}  // namespace leeway
#endif
