// Row-wise operations against double precision: values, gradients by finite differences, and the
// guarantee that a row's bits depend on that row alone.

#include "kernels/rows.h"

#include <algorithm>
#include <array>
#include <functional>
#include <numeric>

#include "kernels/test_support.h"

namespace leeway {
namespace {

using testing::at_every_level;
using testing::close_to;
using testing::kFloatNan;
using testing::kUntouched;
using testing::numeric_gradient;
using testing::random_floats;
using testing::same_bits;
using testing::widened;
using testing::widths;

double dot(std::span<const double> a, std::span<const double> b) {
  return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
}

// Runs `compute(team, first, rows, out)`, which fills rows * width floats of `out` for the rows
// from `first` on, with several numbers of threads and then for a few rows at a time.
void expect_rows_stand_alone(
    int64_t rows, int64_t width,
    const std::function<void(Team&, int64_t first, int64_t count, float* out)>& compute) {
  std::vector<float> all;
  for (int threads : {1, 2, 3, 5}) {
    ThreadPool pool(threads);
    std::vector<float> out(rows * width, kUntouched);
    pool.run_team([&](Team& team) { compute(team, 0, rows, out.data()); });
    if (all.empty()) all = out;
    ASSERT_TRUE(same_bits(out, all)) << threads << " threads";
  }
  ThreadPool pool(1);
  for (int64_t first = 0; first < rows; ++first) {
    const int64_t count = std::min<int64_t>(rows - first, first % 3 + 1);
    std::vector<float> out(count * width, kUntouched);
    pool.run_team([&](Team& team) { compute(team, first, count, out.data()); });
    ASSERT_TRUE(same_bits(out, std::span(all).subspan(first * width, count * width)))
        << count << " rows from " << first;
  }
}

// ---------------------------------------------------------------------------------------------
// RMSNorm

std::vector<double> norm_reference(std::span<const double> x, std::span<const double> weight,
                                   double eps) {
  const double r = 1.0 / std::sqrt(dot(x, x) / static_cast<double>(x.size()) + eps);
  std::vector<double> y;
  for (size_t i = 0; i < x.size(); ++i) y.push_back(x[i] * r * weight[i]);
  return y;
}

TEST(RmsNorm, AndItsGradientAgreeWithDoubles) {
  ThreadPool pool(1);
  Rng rng(1);
  const int64_t rows = 3;
  const float eps = 1e-5f;
  for (int64_t width : widths()) {
    SCOPED_TRACE(width);
    std::vector<float> x = random_floats(rng, rows * width);
    for (int64_t i = 0; i < width; ++i) x[width + i] *= 1e-3f;  // small enough that eps matters
    const std::vector<float> weight = random_floats(rng, width);
    const std::vector<float> dy = random_floats(rng, rows * width);
    const std::vector<float> dx_old = random_floats(rng, rows * width);
    const std::vector<float> dweight_old = random_floats(rng, width);

    std::vector<double> y, inverse, dx = widened(dx_old), dweight = widened(dweight_old);
    std::vector<double> w = widened(weight);
    for (int64_t row = 0; row < rows; ++row) {
      std::vector<double> xs = widened(std::span(x).subspan(row * width, width));
      const std::vector<double> dys = widened(std::span(dy).subspan(row * width, width));
      const std::vector<double> ys = norm_reference(xs, w, eps);
      y.insert(y.end(), ys.begin(), ys.end());
      inverse.push_back(ys[0] / (xs[0] * w[0]));
      const auto loss = [&] { return dot(norm_reference(xs, w, eps), dys); };
      const std::vector<double> slope = numeric_gradient(xs, loss, 1e-4 / inverse[row]);
      const std::vector<double> weight_slope = numeric_gradient(w, loss);
      for (int64_t i = 0; i < width; ++i) dx[row * width + i] += slope[i];
      for (int64_t i = 0; i < width; ++i) dweight[i] += weight_slope[i];
    }

    at_every_level([&](int64_t) {
      std::vector<float> got_y(rows * width + 1, kUntouched), got_inverse(rows + 1, kUntouched);
      std::vector<float> got_dx = dx_old, got_dweight = dweight_old, without = got_y;
      pool.run_team([&](Team& team) {
        rms_norm(team, x.data(), rows, width, weight.data(), eps, got_y.data(), got_inverse.data());
        rms_norm(team, x.data(), rows, width, weight.data(), eps, without.data());
        rms_norm_backward(team, x.data(), dy.data(), rows, width, weight.data(), got_inverse.data(),
                          got_dx.data(), got_dweight.data());
      });
      ASSERT_TRUE(same_bits(without, got_y));
      ASSERT_EQ(got_y.back(), kUntouched);
      ASSERT_EQ(got_inverse.back(), kUntouched);
      got_y.pop_back(), got_inverse.pop_back();
      ASSERT_TRUE(close_to(got_y, y, [&](size_t i) { return 2e-6 * std::abs(y[i]); }));
      ASSERT_TRUE(
          close_to(got_inverse, inverse, [&](size_t i) { return 2e-6 * std::abs(inverse[i]); }));
      ASSERT_TRUE(close_to(got_dx, dx, [&](size_t i) { return 1e-5 * (1 + inverse[i / width]); }));
      ASSERT_TRUE(close_to(got_dweight, dweight, 2e-6));
    });
    if (HasFatalFailure()) return;
  }
}

TEST(RmsNorm, OfZerosIsZero) {
  ThreadPool pool(1);
  const std::vector<float> x(20), weight(20, 2.0f);
  at_every_level([&](int64_t) {
    std::vector<float> y(20, kUntouched), inverse(1);
    pool.run_team([&](Team& team) {
      rms_norm(team, x.data(), 1, 20, weight.data(), 1e-6f, y.data(), inverse.data());
    });
    ASSERT_TRUE(same_bits(y, x));
    ASSERT_NEAR(inverse[0], 1000.0, 1e-3);
  });
}

TEST(RmsNorm, ARowStandsAlone) {
  Rng rng(2);
  const int64_t rows = 43, width = 37;
  std::vector<float> x = random_floats(rng, rows * width);
  const std::vector<float> weight = random_floats(rng, width),
                           dy = random_floats(rng, rows * width);
  x[20 * width + 5] = kFloatNan;  // affects its own row only
  at_every_level([&](int64_t) {
    expect_rows_stand_alone(rows, 2 * width, [&](Team& team, int64_t first, int64_t n, float* out) {
      const float* from = x.data() + first * width;
      std::vector<float> y(n * width), dx(n * width), inverse(n), dweight(width);
      rms_norm(team, from, n, width, weight.data(), 1e-6f, y.data(), inverse.data());
      rms_norm_backward(team, from, dy.data() + first * width, n, width, weight.data(),
                        inverse.data(), dx.data(), dweight.data());
      for (int64_t i = 0; i < n; ++i) {  // the two results of a row side by side
        std::copy_n(y.begin() + i * width, width, out + 2 * i * width);
        std::copy_n(dx.begin() + i * width, width, out + (2 * i + 1) * width);
      }
    });
  });
}

TEST(RmsNorm, TheWeightsGradientDoesNotDependOnTheNumberOfThreads) {
  Rng rng(3);
  const int64_t rows = 300, width = 150;
  const std::vector<float> x = random_floats(rng, rows * width),
                           dy = random_floats(rng, rows * width);
  const std::vector<float> weight = random_floats(rng, width), inverse = random_floats(rng, rows);
  at_every_level([&](int64_t) {
    std::vector<float> one;
    for (int threads : {1, 2, 3, 5}) {
      ThreadPool pool(threads);
      std::vector<float> dx(rows * width), dweight(width, 0.5f);
      pool.run_team([&](Team& team) {
        rms_norm_backward(team, x.data(), dy.data(), rows, width, weight.data(), inverse.data(),
                          dx.data(), dweight.data());
      });
      if (one.empty()) one = dweight;
      ASSERT_TRUE(same_bits(dweight, one)) << threads << " threads";
    }
  });
}

// ---------------------------------------------------------------------------------------------
// Heads

// Inputs for transform_heads, with positions in random order.
struct Heads {
  HeadLayout layout;
  int64_t rows;
  bool normed;
  float eps = 1e-5f;
  std::vector<float> qkv, query_norm, key_norm, cosines, sines, dq, dk;
  std::vector<int32_t> positions;

  Heads(Rng& rng, HeadLayout of, int64_t row_count, bool norms)
      : layout(of), rows(row_count), normed(norms), qkv(random_floats(rng, rows * layout.width())) {
    constexpr int64_t kPositions = 50;
    query_norm = random_floats(rng, layout.head_dim),
    key_norm = random_floats(rng, layout.head_dim);
    dq = random_floats(rng, rows * layout.query_width());
    dk = random_floats(rng, rows * layout.kv_width());
    for (int64_t i = 0; i < kPositions * layout.head_dim / 2; ++i) {
      const double angle = 6.3 * rng.uniform();
      cosines.push_back(static_cast<float>(std::cos(angle)));
      sines.push_back(static_cast<float>(std::sin(angle)));
    }
    for (int64_t i = 0; i < rows; ++i) {
      positions.push_back(static_cast<int32_t>(rng.below(kPositions)));
    }
  }
  HeadTransform transform() const {
    HeadTransform out{layout};
    if (normed) out.query_norm = query_norm.data(), out.key_norm = key_norm.data();
    out.eps = eps, out.cosines = cosines.data(), out.sines = sines.data();
    return out;
  }
  bool is_query(int64_t head) const { return head < layout.query_heads; }
  int64_t heads() const { return layout.query_heads + layout.kv_heads; }
  std::vector<double> input(int64_t row, int64_t head) const {
    return widened(
        std::span(qkv).subspan(row * layout.width() + head * layout.head_dim, layout.head_dim));
  }
  // Index of a head's result or its gradient.
  int64_t place(int64_t row, int64_t head) const {
    return is_query(head) ? row * layout.query_width() + head * layout.head_dim
                          : row * layout.kv_width() + (head - layout.query_heads) * layout.head_dim;
  }
  std::vector<double> gradient(int64_t row, int64_t head) const {
    return widened(std::span(is_query(head) ? dq : dk).subspan(place(row, head), layout.head_dim));
  }
  std::vector<double> reference(int64_t row, bool query, std::vector<double> x,
                                std::span<const double> norm) const {
    const int64_t half = layout.head_dim / 2, at = positions[row] * half;
    if (normed) x = norm_reference(x, norm, eps);
    std::vector<double> y(x.size());
    const double scale = query ? 1.0 / std::sqrt(static_cast<double>(layout.head_dim)) : 1.0;
    for (int64_t i = 0; i < half; ++i) {
      const double c = cosines[at + i], s = sines[at + i];
      y[i] = scale * (x[i] * c - x[i + half] * s);
      y[i + half] = scale * (x[i + half] * c + x[i] * s);
    }
    return y;
  }
};

void check_heads(ThreadPool& pool, const Heads& heads) {
  const HeadLayout& layout = heads.layout;
  const int64_t rows = heads.rows, dim = layout.head_dim;
  SCOPED_TRACE(::testing::Message() << layout.query_heads << " and " << layout.kv_heads
                                    << " heads of " << dim << (heads.normed ? ", normed" : ""));
  std::vector<double> q(heads.dq.size()), k(heads.dk.size());
  std::vector<double> dqkv(heads.qkv.size(), static_cast<double>(kUntouched));
  std::array<std::vector<double>, 2> dnorm = {std::vector<double>(dim, 0.25),
                                              std::vector<double>(dim, -0.5)};
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t head = 0; head < heads.heads(); ++head) {
      const bool query = heads.is_query(head);
      std::vector<double> x = heads.input(row, head);
      std::vector<double> norm = widened(query ? heads.query_norm : heads.key_norm);
      const std::vector<double> dy = heads.gradient(row, head);
      const auto loss = [&] { return dot(heads.reference(row, query, x, norm), dy); };
      const std::vector<double> y = heads.reference(row, query, x, norm);
      std::copy(y.begin(), y.end(), (query ? q : k).begin() + heads.place(row, head));
      const std::vector<double> dx = numeric_gradient(x, loss);
      std::copy(dx.begin(), dx.end(), dqkv.begin() + row * layout.width() + head * dim);
      if (!heads.normed) continue;
      const std::vector<double> slope = numeric_gradient(norm, loss);
      for (int64_t i = 0; i < dim; ++i) dnorm[query ? 0 : 1][i] += slope[i];
    }
  }
  at_every_level([&](int64_t) {
    std::vector<float> got_q(q.size(), kUntouched), got_k(k.size(), kUntouched);
    std::vector<float> got_dqkv(dqkv.size(), kUntouched);
    std::vector<float> dquery(dim, 0.25f), dkey(dim, -0.5f);
    const HeadTransform transform = heads.transform();
    pool.run_team([&](Team& team) {
      transform_heads(team, transform, heads.qkv.data(), heads.positions.data(), rows, got_q.data(),
                      got_k.data());
      transform_heads_backward(team, transform, heads.qkv.data(), heads.positions.data(), rows,
                               heads.dq.data(), heads.dk.data(), got_dqkv.data(), dquery.data(),
                               dkey.data());
    });
    ASSERT_TRUE(close_to(got_q, q, 2e-6));
    ASSERT_TRUE(close_to(got_k, k, 2e-6));
    ASSERT_TRUE(close_to(got_dqkv, dqkv, [](size_t) { return 1e-5; }));
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t i = (row + 1) * layout.width() - layout.kv_width(); i % layout.width(); ++i) {
        ASSERT_EQ(got_dqkv[i], kUntouched) << "a value column was written";
      }
    }
    ASSERT_TRUE(close_to(dquery, dnorm[0], 1e-5));
    ASSERT_TRUE(close_to(dkey, dnorm[1], 1e-5));
  });
}

TEST(TransformHeads, AndItsGradientAgreeWithDoubles) {
  ThreadPool pool(1);
  Rng rng(4);
  for (int64_t dim : {2, 4, 6, 8, 10, 16, 24, 32, 34, 64, 66, 128}) {
    for (bool normed : {false, true}) {
      check_heads(pool, Heads(rng, {3, 1, dim}, 2, normed));
      check_heads(pool, Heads(rng, {2, 2, dim}, 1, normed));
      if (HasFatalFailure()) return;
    }
  }
  check_heads(pool, Heads(rng, {2, 1, 6}, 130, true));  // norm gradients across blocks of rows
}

TEST(TransformHeads, ARowStandsAlone) {
  Rng rng(5);
  for (bool normed : {false, true}) {
    Heads heads(rng, {4, 2, 10}, 41, normed);
    heads.qkv[7 * heads.layout.width() + 3] = kFloatNan;
    const HeadTransform transform = heads.transform();
    std::vector<float> dquery(10), dkey(10);
    const int64_t queries = heads.layout.query_width(), keys = heads.layout.kv_width();
    at_every_level([&](int64_t) {
      expect_rows_stand_alone(
          heads.rows, queries, [&](Team& team, int64_t first, int64_t n, float* q) {
            std::vector<float> k(n * keys);
            transform_heads(team, transform, heads.qkv.data() + first * heads.layout.width(),
                            heads.positions.data() + first, n, q, k.data());
          });
      expect_rows_stand_alone(
          heads.rows, heads.layout.width(), [&](Team& team, int64_t first, int64_t n, float* dqkv) {
            transform_heads_backward(
                team, transform, heads.qkv.data() + first * heads.layout.width(),
                heads.positions.data() + first, n, heads.dq.data() + first * queries,
                heads.dk.data() + first * keys, dqkv, dquery.data(), dkey.data());
          });
    });
  }
}

TEST(TransformHeads, TheNormsGradientsDoNotDependOnTheNumberOfThreads) {
  Rng rng(6);
  const Heads heads(rng, {4, 2, 24}, 500, true);
  const HeadTransform transform = heads.transform();
  at_every_level([&](int64_t) {
    std::vector<float> one;
    for (int threads : {1, 2, 3, 5}) {
      ThreadPool pool(threads);
      std::vector<float> dqkv(heads.qkv.size()), dnorms(48);
      pool.run_team([&](Team& team) {
        transform_heads_backward(team, transform, heads.qkv.data(), heads.positions.data(),
                                 heads.rows, heads.dq.data(), heads.dk.data(), dqkv.data(),
                                 dnorms.data(), dnorms.data() + 24);
      });
      if (one.empty()) one = dnorms;
      ASSERT_TRUE(same_bits(dnorms, one)) << threads << " threads";
    }
  });
}

// ---------------------------------------------------------------------------------------------
// SwiGLU

double silu(double x) { return x / (1.0 + std::exp(-x)); }
double silu_slope(double x) { return (silu(x + 1e-4) - silu(x - 1e-4)) / 2e-4; }

TEST(Swiglu, AndItsGradientAgreeWithDoubles) {
  ThreadPool pool(1);
  Rng rng(7);
  const int64_t rows = 2;
  for (int64_t width : widths()) {
    SCOPED_TRACE(width);
    std::vector<float> gate_up = random_floats(rng, rows * 2 * width, 3.0);
    for (size_t i = 0; i < gate_up.size(); i += 5)
      gate_up[i] *= 15.0f;  // where exp underflows or overflows
    const std::vector<float> ds = random_floats(rng, rows * width);
    std::vector<double> s, d, scale;
    for (int64_t row = 0; row < rows; ++row) {
      const float* gate = gate_up.data() + row * 2 * width;
      for (int64_t i = 0; i < width; ++i) s.push_back(silu(gate[i]) * gate[width + i]);
      for (int64_t i = 0; i < width; ++i) {
        scale.push_back(std::abs(static_cast<double>(ds[row * width + i] * gate[width + i])));
        d.push_back(static_cast<double>(ds[row * width + i]) * gate[width + i] *
                    silu_slope(gate[i]));
      }
      for (int64_t i = 0; i < width; ++i) {
        d.push_back(static_cast<double>(ds[row * width + i]) * silu(gate[i]));
        scale.push_back(std::abs(d.back()));
      }
    }
    at_every_level([&](int64_t) {
      std::vector<float> got(rows * width, kUntouched), slope(rows * 2 * width, kUntouched);
      std::vector<float> in_place = gate_up;
      pool.run_team([&](Team& team) {
        swiglu(team, gate_up.data(), rows, width, got.data());
        swiglu_backward(team, gate_up.data(), ds.data(), rows, width, slope.data());
        swiglu_backward(team, in_place.data(), ds.data(), rows, width, in_place.data());
      });
      ASSERT_TRUE(close_to(got, s, [&](size_t i) { return 1e-6 * std::abs(s[i]) + 1e-34; }));
      ASSERT_TRUE(close_to(slope, d, [&](size_t i) { return 2e-6 * scale[i] + 1e-34; }));
      ASSERT_TRUE(same_bits(in_place, slope));
    });
    if (HasFatalFailure()) return;
  }
}

TEST(Swiglu, GoesTheWayOfItsLimitsAtTheFarEnds) {
  ThreadPool pool(1);
  const std::vector<float> gate_up = {1e30f, 200.0f, 0.0f, -200.0f, -1e30f, 2, 2, 2, 2, 2};
  const std::vector<float> ds(5, 1.0f);
  at_every_level([&](int64_t) {
    std::vector<float> s(5), d(10);
    pool.run_team([&](Team& team) {
      swiglu(team, gate_up.data(), 1, 5, s.data());
      swiglu_backward(team, gate_up.data(), ds.data(), 1, 5, d.data());
    });
    ASSERT_EQ(s, (std::vector<float>{2e30f, 400.0f, 0.0f, 0.0f, 0.0f}));
    ASSERT_EQ(d, (std::vector<float>{2, 2, 1, 0, 0, 1e30f, 200.0f, 0, 0, 0}));
  });
}

TEST(Swiglu, AnElementHasTheSameBitsWhereverItLies) {
  Rng rng(8);
  const int64_t width = 61;
  const std::vector<float> gate_up = random_floats(rng, 2 * width), ds = random_floats(rng, width);
  ThreadPool pool(1);
  at_every_level([&](int64_t) {
    std::vector<float> s(width), d(2 * width);
    pool.run_team([&](Team& team) {
      swiglu(team, gate_up.data(), 1, width, s.data());
      swiglu_backward(team, gate_up.data(), ds.data(), 1, width, d.data());
    });
    for (int64_t i = 0; i < width; ++i) {
      const std::vector<float> pair = {gate_up[i], gate_up[width + i]};
      std::vector<float> one(1), slopes(2);
      pool.run_team([&](Team& team) {
        swiglu(team, pair.data(), 1, 1, one.data());
        swiglu_backward(team, pair.data(), &ds[i], 1, 1, slopes.data());
      });
      ASSERT_TRUE(same_bits(one, std::span(s).subspan(i, 1))) << i;
      ASSERT_TRUE(same_bits(slopes, std::vector<float>{d[i], d[width + i]})) << i;
    }
  });
}

TEST(Swiglu, ARowStandsAlone) {
  Rng rng(9);
  const int64_t rows = 45, width = 21;
  std::vector<float> gate_up = random_floats(rng, rows * 2 * width);
  const std::vector<float> ds = random_floats(rng, rows * width);
  gate_up[11 * 2 * width] = kFloatNan;
  at_every_level([&](int64_t) {
    expect_rows_stand_alone(rows, width, [&](Team& team, int64_t first, int64_t n, float* s) {
      swiglu(team, gate_up.data() + first * 2 * width, n, width, s);
    });
    expect_rows_stand_alone(rows, 2 * width, [&](Team& team, int64_t first, int64_t n, float* d) {
      swiglu_backward(team, gate_up.data() + first * 2 * width, ds.data() + first * width, n, width,
                      d);
    });
  });
}

// ---------------------------------------------------------------------------------------------
// Sums

TEST(AddColumnSums, AddsTheRowsInOrderToWhatWasThere) {
  ThreadPool one(1), two(2);
  Rng rng(10);
  for (int64_t width : {1, 2, 7, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200}) {
    for (int64_t rows : {0, 1, 2, 33}) {
      const int64_t ldx = width + 3;
      const std::vector<float> x = random_floats(rng, rows * ldx + 1);
      const std::vector<float> old = random_floats(rng, width);
      std::vector<float> expected = old;
      for (int64_t row = 0; row < rows; ++row) {
        for (int64_t i = 0; i < width; ++i) expected[i] += x[row * ldx + i];
      }
      at_every_level([&](int64_t) {
        for (ThreadPool* pool : {&one, &two}) {
          std::vector<float> out = old;
          out.push_back(kUntouched);
          pool->run_team(
              [&](Team& team) { add_column_sums(team, x.data(), rows, width, ldx, out.data()); });
          ASSERT_EQ(out.back(), kUntouched);
          out.pop_back();
          ASSERT_TRUE(same_bits(out, expected)) << rows << " rows of " << width;
        }
      });
    }
  }
}

}  // namespace
}  // namespace leeway
