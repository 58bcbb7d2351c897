// Blocked attention against double precision, and the guarantee that a query's bits do not depend
// on what else is computed, on how a sequence was cut into passes or on where its blocks lie.

#include "kernels/attention.h"

#include <algorithm>
#include <numeric>

#include "kernels/test_support.h"

namespace leeway {
namespace {

using testing::at_every_level;
using testing::close_to;
using testing::kEps;
using testing::kFloatNan;
using testing::numeric_gradient;
using testing::random_floats;
using testing::same_bits;
using testing::widened;

constexpr float kUntouched = -77.0f;

// Whole sequences one after the other: queries, keys, values and the gradient of the result. Values
// and their gradients lie in columns of wider rows.
struct Problem {
  HeadLayout layout;
  std::vector<int64_t> lengths;
  int64_t rows = 0, ldv;
  std::vector<float> q, k, v, dout;

  Problem(uint64_t seed, int64_t kv_heads, int64_t group, int64_t dim,
          const std::vector<int64_t>& of_lengths, double score_scale = 1.0)
      : layout{kv_heads * group, kv_heads, dim}, lengths(of_lengths), ldv(layout.kv_width() + 3) {
    Rng rng(seed);
    for (int64_t length : lengths) rows += length;
    q = random_floats(rng, rows * layout.query_width(),
                      2 * score_scale / std::sqrt(static_cast<double>(dim)));
    k = random_floats(rng, rows * layout.kv_width());
    v = random_floats(rng, rows * ldv);
    dout = random_floats(rng, rows * layout.query_width());
  }
  int64_t group() const { return layout.query_heads / layout.kv_heads; }
  int64_t first_row(size_t sequence) const {
    return std::accumulate(lengths.begin(), lengths.begin() + sequence, int64_t{0});
  }
  std::string label() const {
    return "group " + std::to_string(group()) + ", head_dim " + std::to_string(layout.head_dim) +
           ", " + std::to_string(lengths.size()) + " sequences, the longest of " +
           std::to_string(*std::max_element(lengths.begin(), lengths.end()));
  }
};

int64_t blocks_for(int64_t length) { return (length + kBlockKeys - 1) / kBlockKeys; }

// Block memory filled with NaN, with blocks handed out in random order and gaps between them.
struct Cache {
  HeadLayout layout;
  int64_t stride;
  std::vector<float> memory;
  std::vector<std::vector<int32_t>> tables;

  Cache(uint64_t seed, const Problem& p)
      : layout(p.layout), stride(KvBlocks::block_floats(p.layout) + 7) {
    int64_t needed = 0;
    for (int64_t length : p.lengths) needed += blocks_for(length);
    std::vector<int32_t> free(needed + 3);
    std::iota(free.begin(), free.end(), 0);
    Rng rng(seed);
    for (size_t i = free.size(); i > 1; --i) std::swap(free[i - 1], free[rng.below(i)]);
    for (int64_t length : p.lengths) {
      tables.emplace_back(free.end() - blocks_for(length), free.end());
      free.resize(free.size() - tables.back().size());
    }
    memory.assign((needed + 3) * stride, kFloatNan);
  }
  KvBlocks blocks() { return {memory.data(), stride}; }
  // The rows of each sequence from `begin` to `end` or its own end, packed one after the other.
  std::vector<SequenceRows> pass(const Problem& p, int64_t begin, int64_t end) const {
    std::vector<SequenceRows> list;
    int64_t row = 0;
    for (size_t s = 0; s < p.lengths.size(); ++s) {
      const int64_t last = std::min(end, p.lengths[s]);
      if (last <= begin) continue;
      list.push_back({row, last - begin, begin, tables[s].data()});
      row += last - begin;
    }
    return list;
  }
};

struct Result {
  std::vector<float> out, log_sums;
};

Result attend_whole(ThreadPool& pool, const Problem& p, Cache& cache) {
  Result r{std::vector<float>(p.q.size(), kUntouched),
           std::vector<float>(p.rows * p.layout.query_heads, kUntouched)};
  const std::vector<SequenceRows> list = cache.pass(p, 0, std::numeric_limits<int64_t>::max());
  pool.run_team([&](Team& team) {
    store_kv(team, p.layout, list, p.k.data(), p.v.data(), p.ldv, cache.blocks());
    attend(team, p.layout, list, p.q.data(), cache.blocks(), r.out.data(), r.log_sums.data());
  });
  return r;
}

// The same in several passes that end at the positions `ends`: each stores its keys and attends.
Result attend_in_passes(ThreadPool& pool, const Problem& p, Cache& cache,
                        const std::vector<int64_t>& ends) {
  Result r{std::vector<float>(p.q.size(), kUntouched),
           std::vector<float>(p.rows * p.layout.query_heads, kUntouched)};
  int64_t begin = 0;
  for (int64_t end : ends) {
    const std::vector<SequenceRows> list = cache.pass(p, begin, end);
    std::vector<float> q, k, v;
    std::vector<int64_t> rows;  // rows of the problem
    for (size_t s = 0; s < p.lengths.size(); ++s) {
      for (int64_t t = begin; t < std::min(end, p.lengths[s]); ++t) {
        rows.push_back(p.first_row(s) + t);
      }
    }
    const auto gather = [&](const std::vector<float>& from, int64_t width, std::vector<float>& to) {
      for (int64_t row : rows) {
        to.insert(to.end(), from.begin() + row * width, from.begin() + (row + 1) * width);
      }
    };
    gather(p.q, p.layout.query_width(), q);
    gather(p.k, p.layout.kv_width(), k);
    gather(p.v, p.ldv, v);
    std::vector<float> out(q.size()), log_sums(rows.size() * p.layout.query_heads);
    pool.run_team([&](Team& team) {
      store_kv(team, p.layout, list, k.data(), v.data(), p.ldv, cache.blocks());
      attend(team, p.layout, list, q.data(), cache.blocks(), out.data(), log_sums.data());
    });
    const int64_t width = p.layout.query_width(), heads = p.layout.query_heads;
    for (size_t i = 0; i < rows.size(); ++i) {
      std::copy_n(out.begin() + i * width, width, r.out.begin() + rows[i] * width);
      std::copy_n(log_sums.begin() + i * heads, heads, r.log_sums.begin() + rows[i] * heads);
    }
    begin = end;
  }
  return r;
}

// The same in double precision.
struct Reference {
  std::vector<double> out, log_sums, dq, dk, dv;
  double largest_score = 0.0;

  // With `gradients`, also computes dq, dk and dv (dense) from the problem's dout.
  Reference(const Problem& p, std::span<const double> q, std::span<const double> k,
            std::span<const double> v, bool gradients)
      : out(q.size()), log_sums(p.rows * p.layout.query_heads) {
    if (gradients) dq.resize(q.size()), dk.resize(k.size()), dv.resize(k.size());
    int64_t first = 0;
    for (int64_t length : p.lengths) {
      for (int64_t t = 0; t < length; ++t) {
        for (int64_t head = 0; head < p.layout.query_heads; ++head) {
          query(p, q, k, v, first, t, head, gradients);
        }
      }
      first += length;
    }
  }

 private:
  void query(const Problem& p, std::span<const double> q, std::span<const double> k,
             std::span<const double> v, int64_t first, int64_t t, int64_t head, bool gradients) {
    const int64_t dim = p.layout.head_dim, kv_width = p.layout.kv_width();
    const int64_t at = (first + t) * p.layout.query_width() + head * dim;
    const int64_t kv_at = first * kv_width + head / p.group() * dim;
    const int64_t v_at = first * p.ldv + head / p.group() * dim;
    std::vector<double> weights(t + 1);
    for (int64_t key = 0; key <= t; ++key) {
      for (int64_t j = 0; j < dim; ++j) weights[key] += q[at + j] * k[kv_at + key * kv_width + j];
      largest_score = std::max(largest_score, std::abs(weights[key]));
    }
    const double largest = *std::max_element(weights.begin(), weights.end());
    double total = 0.0;
    for (double score : weights) total += std::exp(score - largest);
    log_sums[(first + t) * p.layout.query_heads + head] = largest + std::log(total);
    for (double& score : weights) score = std::exp(score - largest) / total;
    for (int64_t key = 0; key <= t; ++key) {
      for (int64_t j = 0; j < dim; ++j) out[at + j] += weights[key] * v[v_at + key * p.ldv + j];
    }
    if (!gradients) return;
    std::vector<double> slopes(t + 1);
    double mean = 0.0;
    for (int64_t key = 0; key <= t; ++key) {
      for (int64_t j = 0; j < dim; ++j) slopes[key] += p.dout[at + j] * v[v_at + key * p.ldv + j];
      mean += weights[key] * slopes[key];
    }
    for (int64_t key = 0; key <= t; ++key) {
      const double slope = weights[key] * (slopes[key] - mean);
      const int64_t to = kv_at + key * kv_width;
      for (int64_t j = 0; j < dim; ++j) {
        dq[at + j] += slope * k[to + j];
        dk[to + j] += slope * q[at + j];
        dv[to + j] += weights[key] * p.dout[at + j];
      }
    }
  }
};

Reference reference_of(const Problem& p, bool gradients = false) {
  return Reference(p, widened(p.q), widened(p.k), widened(p.v), gradients);
}

struct Gradients {
  std::vector<float> dq, dk, dv;  // dv in rows `ldv` apart
};

Gradients backward(ThreadPool& pool, const Problem& p, const Result& forward) {
  Gradients g{std::vector<float>(p.q.size(), kUntouched),
              std::vector<float>(p.k.size(), kUntouched),
              std::vector<float>(p.v.size(), kUntouched)};
  std::vector<SequenceRows> list;
  for (size_t s = 0; s < p.lengths.size(); ++s) {
    list.push_back({p.first_row(s), p.lengths[s], 0, nullptr});
  }
  pool.run_team([&](Team& team) {
    attend_backward(team, p.layout, list, p.q.data(), p.k.data(), p.v.data(), p.ldv,
                    forward.out.data(), p.dout.data(), forward.log_sums.data(), g.dq.data(),
                    g.dk.data(), g.dv.data(), p.ldv);
  });
  return g;
}

// The value columns of rows `ldv` apart; checks that the columns in between are untouched.
std::vector<float> dense_values(const Problem& p, const std::vector<float>& dv) {
  std::vector<float> out;
  for (int64_t i = 0; i < std::ssize(dv); ++i) {
    if (i % p.ldv < p.layout.kv_width()) {
      out.push_back(dv[i]);
    } else {
      EXPECT_EQ(dv[i], kUntouched) << "column " << i % p.ldv << " was written";
    }
  }
  return out;
}

void check_problem(const Problem& p, bool gradients) {
  SCOPED_TRACE(p.label());
  ThreadPool pool(1);
  const Reference expected = reference_of(p, gradients);
  // A score is a chain along the head dimension, and its error carries over to the weight.
  const double lost = 2e-6 + 2 * kEps * expected.largest_score;
  at_every_level([&](int64_t) {
    Cache cache(1, p);
    const Result r = attend_whole(pool, p, cache);
    ASSERT_TRUE(close_to(r.out, expected.out, lost));
    ASSERT_TRUE(close_to(r.log_sums, expected.log_sums, [&](size_t) { return lost; }));
    if (!gradients) return;
    const Gradients g = backward(pool, p, r);
    ASSERT_TRUE(close_to(g.dq, expected.dq, 4 * lost));
    ASSERT_TRUE(close_to(g.dk, expected.dk, 4 * lost));
    ASSERT_TRUE(close_to(dense_values(p, g.dv), expected.dv, 4 * lost));
  });
}

TEST(Attend, AndItsGradientAgreeWithDoublesForEveryGroupAndHeadSize) {
  Rng rng(1);
  for (int64_t group : {1, 2, 3, 4, 8}) {
    for (int64_t dim : {2, 3, 4, 5, 6, 7, 8, 16, 24, 32, 64, 128}) {
      std::vector<int64_t> lengths;
      for (int i = 0; i < 3; ++i) lengths.push_back(1 + static_cast<int64_t>(rng.below(45)));
      check_problem(Problem(rng.next(), 1 + group % 2, group, dim, lengths), true);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(Attend, AndItsGradientAgreeWithDoublesAtEveryLength) {
  std::vector<int64_t> lengths(70);
  std::iota(lengths.begin(), lengths.end(), 1);
  check_problem(Problem(2, 2, 2, 4, lengths), true);
  check_problem(Problem(3, 1, 3, 8, {300, 1, 257}), true);
  check_problem(Problem(4, 1, 12, 6, {33}), true);  // more query heads than a tile
  check_problem(Problem(5, 2, 1, 16, {700}), false);
}

TEST(Attend, StandsLargeScores) {
  check_problem(Problem(6, 2, 2, 16, {40, 17}, 30.0), true);
  check_problem(Problem(7, 1, 2, 8, {50}, 3000.0), false);
}

TEST(Attend, GradientsAreThoseOfDifferences) {
  for (const Problem& p : {Problem(8, 1, 2, 3, {5, 1}), Problem(9, 2, 1, 4, {19})}) {
    std::vector<double> q = widened(p.q), k = widened(p.k), v = widened(p.v);
    const auto loss = [&] {
      const Reference r(p, q, k, v, false);
      return std::inner_product(r.out.begin(), r.out.end(), p.dout.begin(), 0.0);
    };
    const std::vector<double> dq = numeric_gradient(q, loss), dk = numeric_gradient(k, loss);
    const std::vector<double> dv = numeric_gradient(v, loss);
    ThreadPool pool(1);
    at_every_level([&](int64_t) {
      Cache cache(1, p);
      const Gradients g = backward(pool, p, attend_whole(pool, p, cache));
      ASSERT_TRUE(close_to(g.dq, dq, 1e-5));
      ASSERT_TRUE(close_to(g.dk, dk, 1e-5));
      const std::vector<float> dv_dense = dense_values(p, g.dv);
      std::vector<double> dv_expected;
      for (int64_t i = 0; i < std::ssize(dv); ++i) {
        if (i % p.ldv < p.layout.kv_width()) dv_expected.push_back(dv[i]);
      }
      ASSERT_TRUE(close_to(dv_dense, dv_expected, 1e-5));
    });
  }
}

TEST(Attend, HasTheSameBitsHoweverASequenceIsCutIntoPasses) {
  Rng rng(10);
  for (int64_t group : {1, 2, 3, 8}) {
    for (int64_t dim : {2, 5, 16, 24}) {
      const Problem p(rng.next(), 2, group, dim,
                      {1, 70, 16, 17, 1 + static_cast<int64_t>(rng.below(200))});
      SCOPED_TRACE(p.label());
      const int64_t longest = *std::max_element(p.lengths.begin(), p.lengths.end());
      ThreadPool pool(1);
      at_every_level([&](int64_t) {
        Cache cache(1, p);
        const Result whole = attend_whole(pool, p, cache);
        for (int64_t most : {int64_t{1}, int64_t{7}, int64_t{16}, int64_t{64}}) {
          std::vector<int64_t> ends = {0};
          while (ends.back() < longest) {
            ends.push_back(ends.back() + 1 + static_cast<int64_t>(rng.below(most)));
          }
          Cache other(static_cast<uint64_t>(most), p);
          const Result cut = attend_in_passes(pool, p, other, ends);
          ASSERT_TRUE(same_bits(cut.out, whole.out)) << "passes of up to " << most;
          ASSERT_TRUE(same_bits(cut.log_sums, whole.log_sums)) << "passes of up to " << most;
        }
      });
      if (HasFatalFailure()) return;
    }
  }
}

TEST(Attend, ASequenceHasTheSameBitsAlone) {
  const Problem together(11, 2, 3, 10, {40, 3, 90, 16, 33});
  ThreadPool pool(2);
  at_every_level([&](int64_t) {
    Cache cache(1, together);
    const Result all = attend_whole(pool, together, cache);
    const Gradients all_gradients = backward(pool, together, all);
    for (size_t s = 0; s < together.lengths.size(); ++s) {
      Problem alone = together;
      alone.lengths = {together.lengths[s]};
      alone.rows = together.lengths[s];
      const auto part = [&](const std::vector<float>& of) {
        const int64_t width = std::ssize(of) / together.rows;
        const auto begin = of.begin() + together.first_row(s) * width;
        return std::vector<float>(begin, begin + alone.rows * width);
      };
      alone.q = part(together.q), alone.k = part(together.k), alone.v = part(together.v);
      alone.dout = part(together.dout);
      Cache own(2, alone);
      const Result r = attend_whole(pool, alone, own);
      ASSERT_TRUE(same_bits(r.out, part(all.out))) << "sequence " << s;
      ASSERT_TRUE(same_bits(r.log_sums, part(all.log_sums))) << "sequence " << s;
      const Gradients g = backward(pool, alone, r);
      ASSERT_TRUE(same_bits(g.dq, part(all_gradients.dq))) << "sequence " << s;
      ASSERT_TRUE(same_bits(g.dk, part(all_gradients.dk))) << "sequence " << s;
      ASSERT_TRUE(same_bits(g.dv, part(all_gradients.dv))) << "sequence " << s;
    }
  });
}

TEST(Attend, IsTheSameBitForBitWhateverTheNumberOfThreads) {
  const Problem p(12, 2, 3, 18, {200, 1, 65, 130, 16, 7});
  at_every_level([&](int64_t) {
    Result one;
    Gradients one_gradients;
    for (int threads : {1, 2, 3, 5}) {
      SCOPED_TRACE(threads);
      ThreadPool pool(threads);
      Cache cache(1, p);
      const Result r = attend_whole(pool, p, cache);
      const Gradients g = backward(pool, p, r);
      if (threads == 1) one = r, one_gradients = g;
      ASSERT_TRUE(same_bits(r.out, one.out));
      ASSERT_TRUE(same_bits(r.log_sums, one.log_sums));
      ASSERT_TRUE(same_bits(g.dq, one_gradients.dq));
      ASSERT_TRUE(same_bits(g.dk, one_gradients.dk));
      ASSERT_TRUE(same_bits(g.dv, one_gradients.dv));
    }
  });
}

TEST(Attend, HasTheSameBitsWhereverBlocksLieAndWhateverTheyHeldBefore) {
  const Problem p(13, 2, 2, 12, {50, 1, 33, 64, 15});
  ThreadPool pool(1);
  at_every_level([&](int64_t) {
    Result first;
    for (uint64_t seed = 1; seed <= 5; ++seed) {
      Cache cache(seed, p);
      if (seed > 2) {  // numbers instead of NaN
        Rng rng(seed);
        cache.memory = random_floats(rng, std::ssize(cache.memory), 1e6);
      }
      const Result r = attend_whole(pool, p, cache);
      if (seed == 1) first = r;
      ASSERT_TRUE(same_bits(r.out, first.out));
      ASSERT_TRUE(same_bits(r.log_sums, first.log_sums));
    }
  });
}

TEST(Attend, WithoutLogSumsAndWithEmptySequencesIsTheSame) {
  const Problem p(14, 1, 4, 8, {20, 35});
  ThreadPool pool(2);
  at_every_level([&](int64_t) {
    Cache cache(1, p);
    const Result r = attend_whole(pool, p, cache);
    std::vector<SequenceRows> list = cache.pass(p, 0, 100);
    list.insert(list.begin() + 1, {20, 0, 0, nullptr});
    list.insert(list.begin(), {0, 0, 5, nullptr});
    list.push_back({55, 0, 0, nullptr});
    std::vector<float> out(p.q.size(), kUntouched);
    pool.run_team([&](Team& team) {
      store_kv(team, p.layout, list, p.k.data(), p.v.data(), p.ldv, cache.blocks());
      attend(team, p.layout, list, p.q.data(), cache.blocks(), out.data());
    });
    ASSERT_TRUE(same_bits(out, r.out));
    pool.run_team(
        [&](Team& team) { attend(team, p.layout, {}, p.q.data(), cache.blocks(), out.data()); });
  });
}

TEST(Attend, ANanQuerySpoilsItsOwnHeadAlone) {
  const Problem clean(15, 2, 2, 8, {40});
  Problem spoilt = clean;
  const int64_t row = 22, head = 1, at = row * clean.layout.query_width() + head * 8;
  spoilt.q[at + 3] = kFloatNan;
  ThreadPool pool(1);
  at_every_level([&](int64_t) {
    Cache cache(1, clean);
    Result expected = attend_whole(pool, clean, cache);
    const Result r = attend_whole(pool, spoilt, cache);
    for (int64_t j = 0; j < 8; ++j) {
      ASSERT_TRUE(std::isnan(r.out[at + j]));
      expected.out[at + j] = r.out[at + j];
    }
    ASSERT_TRUE(std::isnan(r.log_sums[row * clean.layout.query_heads + head]));
    ASSERT_TRUE(same_bits(r.out, expected.out));
  });
}

TEST(StoreKv, WritesKeysAcrossAndValuesAlongAndZeroBeyondThem) {
  for (int64_t length : {1, 15, 16, 17, 40}) {
    const Problem p(16, 2, 1, 5, {length, 3});
    ThreadPool pool(2);
    Cache cache(3, p);
    attend_whole(pool, p, cache);
    const std::vector<float> written = cache.memory;
    std::vector<float> expected(written.size(), kFloatNan);
    for (size_t s = 0; s < p.lengths.size(); ++s) {
      for (size_t b = 0; b < cache.tables[s].size(); ++b) {
        float* block = expected.data() + cache.tables[s][b] * cache.stride;
        std::fill_n(block, KvBlocks::block_floats(p.layout), 0.0f);
        for (int64_t slot = 0; slot < kBlockKeys; ++slot) {
          const int64_t t = static_cast<int64_t>(b) * kBlockKeys + slot, row = p.first_row(s) + t;
          if (t >= p.lengths[s]) break;
          for (int64_t head = 0; head < 2; ++head) {
            float* keys = block + head * 2 * kBlockKeys * 5;
            for (int64_t j = 0; j < 5; ++j) {
              keys[j * kBlockKeys + slot] = p.k[row * 10 + head * 5 + j];
              keys[kBlockKeys * 5 + slot * 5 + j] = p.v[row * p.ldv + head * 5 + j];
            }
          }
        }
      }
    }
    EXPECT_TRUE(same_bits(written, expected)) << length;
    // Storing key by key gives the same memory.
    Cache again(3, p);
    std::vector<int64_t> ends(std::max<int64_t>(length, 3));
    std::iota(ends.begin(), ends.end(), 1);
    attend_in_passes(pool, p, again, ends);
    EXPECT_TRUE(same_bits(again.memory, expected)) << length;
  }
}

}  // namespace
}  // namespace leeway
