// Operations on a row of logits against double precision: softmax, its gradient, maximum and
// exponentials.

#include <algorithm>
#include <cmath>
#include <numeric>

#include "kernels/rows.h"
#include "kernels/test_support.h"

namespace leeway {
namespace {

using testing::at_every_level;
using testing::close_to;
using testing::kEps;
using testing::kFloatInfinity;
using testing::kFloatNan;
using testing::kUntouched;
using testing::numeric_gradient;
using testing::random_floats;
using testing::same_bits;
using testing::widened;
using testing::widths;

struct SoftmaxReference {
  double log_normaliser, entropy = 0.0;
  std::vector<double> log_p;
};

SoftmaxReference softmax_reference(std::span<const double> z, double it) {
  SoftmaxReference out;
  const double largest = *std::max_element(z.begin(), z.end()) * it;
  double total = 0.0;
  for (double value : z) total += std::exp(value * it - largest);
  out.log_normaliser = largest + std::log(total);
  for (double value : z) {
    out.log_p.push_back(value * it - largest - std::log(total));
    const double p = std::exp(out.log_p.back());
    if (p > 0.0) out.entropy -= p * out.log_p.back();
  }
  return out;
}

// The gradient of g log p[target] + g_entropy H, by its formula.
std::vector<double> softmax_gradient(const SoftmaxReference& r, double it, int64_t target, double g,
                                     double g_entropy) {
  std::vector<double> dz;
  for (size_t i = 0; i < r.log_p.size(); ++i) {
    const double p = std::exp(r.log_p[i]);
    const double from_entropy = p > 0.0 ? p * (r.log_p[i] + r.entropy) : 0.0;
    const double onehot = static_cast<int64_t>(i) == target ? 1.0 : 0.0;
    dz.push_back(it * (g * (onehot - p) - g_entropy * from_entropy));
  }
  return dz;
}

void check_softmax(const std::vector<float>& z, float it, int64_t target) {
  const int64_t n = std::ssize(z);
  SCOPED_TRACE(::testing::Message() << n << " logits at " << it << ", target " << target);
  const double itd = static_cast<double>(it);
  const SoftmaxReference r = softmax_reference(widened(z), itd);
  // The error from scaling the logits in float32.
  double lost = 0.0;
  for (float value : z) {
    if (std::isfinite(value)) lost = std::max(lost, kEps * std::abs(itd * value));
  }
  const double g = 0.7, g_entropy = -0.3;
  const std::vector<double> dz = softmax_gradient(r, itd, target, g, g_entropy);
  const std::vector<double> dz_plain = softmax_gradient(r, itd, target, g, 0.0);
  at_every_level([&](int64_t) {
    const RowStats stats = row_softmax(z.data(), n, it, target, true);
    const double log_p = r.log_p[target];
    if (std::isinf(log_p)) {
      ASSERT_EQ(stats.logprob, -kFloatInfinity);
    } else {
      ASSERT_NEAR(stats.logprob, log_p, 2e-6 + kEps * std::abs(log_p) + 2 * lost);
    }
    ASSERT_NEAR(stats.log_normaliser, r.log_normaliser,
                2e-6 + kEps * std::abs(r.log_normaliser) + 2 * lost);
    ASSERT_NEAR(stats.entropy, r.entropy, 2e-6 * (1 + r.entropy) + 2 * lost * (1 + r.entropy));
    const RowStats without = row_softmax(z.data(), n, it, target, false);
    ASSERT_EQ(without.entropy, 0.0f);
    ASSERT_EQ(without.logprob, stats.logprob);
    ASSERT_EQ(without.log_normaliser, stats.log_normaliser);

    for (bool with_entropy : {false, true}) {
      std::vector<float> got = z;
      row_softmax_backward(got.data(), n, it, target, stats, static_cast<float>(g),
                           with_entropy ? static_cast<float>(g_entropy) : 0.0f);
      const std::vector<double>& expected = with_entropy ? dz : dz_plain;
      ASSERT_TRUE(close_to(got, expected,
                           [&](size_t i) {
                             const double p = std::exp(r.log_p[i]);
                             const double slope =
                                 1 + (p > 0.0 ? std::abs(r.log_p[i]) : 0.0) + r.entropy;
                             const double relative =
                                 4e-6 + 4 * lost + kEps * std::abs(r.log_normaliser);
                             const double onehot = static_cast<int64_t>(i) == target ? kEps : 0.0;
                             return itd * (relative * p * slope + onehot) + 1e-37;
                           }))
          << (with_entropy ? "with" : "without") << " entropy";
    }
  });
}

TEST(RowSoftmax, AndItsGradientAgreeWithDoubles) {
  Rng rng(11);
  std::vector<int64_t> sizes = widths();
  for (int64_t size : {1023, 1024, 1025, 2049, 151936}) sizes.push_back(size);
  for (int64_t n : sizes) {
    for (float it : {1.0f, 0.7f, 3.0f}) {
      if (n > 5000 && it != 0.7f) continue;
      const std::vector<float> z = random_floats(rng, n, 3.0);
      check_softmax(z, it, static_cast<int64_t>(rng.below(n)));
      if (HasFatalFailure()) return;
    }
  }
}

TEST(RowSoftmax, StandsHugeLogits) {
  Rng rng(12);
  for (int64_t n : {1, 2, 5, 16, 33, 100}) {
    for (float it : {1.0f, 0.3f, 2.5f}) {
      for (double scale : {100.0, 1e4}) {
        std::vector<float> z = random_floats(rng, n, scale);
        check_softmax(z, it, 0);
        for (float& value : z) value = value > 0 ? 1e4f : -1e4f;
        check_softmax(z, it, n - 1);
        std::fill(z.begin(), z.end(), static_cast<float>(scale));
        check_softmax(z, it, n / 2);
        std::fill(z.begin(), z.end(), static_cast<float>(-scale));
        check_softmax(z, it, n / 2);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(RowSoftmax, ALogitOfMinusInfinityHasNoShare) {
  Rng rng(13);
  for (int64_t n : {2, 3, 16, 17, 31, 40}) {
    for (int trial = 0; trial < 10; ++trial) {
      std::vector<float> z = random_floats(rng, n, 2.0);
      const int64_t finite = static_cast<int64_t>(rng.below(n));
      for (int64_t i = 0; i < n; ++i) {
        if (i != finite && rng.uniform() < 0.5) z[i] = -kFloatInfinity;
      }
      check_softmax(z, 0.8f, finite);
      check_softmax(z, 0.8f, (finite + 1) % n);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(RowSoftmax, TheFormulaOfTheGradientIsThatOfDifferences) {
  Rng rng(14);
  for (int64_t n : {1, 2, 5, 20}) {
    const double it = 0.8, g = 0.7, g_entropy = -0.3;
    std::vector<double> z = widened(random_floats(rng, n, 2.0));
    const int64_t target = static_cast<int64_t>(rng.below(n));
    const std::vector<double> dz =
        softmax_gradient(softmax_reference(z, it), it, target, g, g_entropy);
    const std::vector<double> differences = numeric_gradient(z, [&] {
      const SoftmaxReference r = softmax_reference(z, it);
      return g * r.log_p[target] + g_entropy * r.entropy;
    });
    for (int64_t i = 0; i < n; ++i) EXPECT_NEAR(dz[i], differences[i], 1e-8);
  }
}

TEST(RowSoftmax, NanAndPlusInfinityAreNotLost) {
  Rng rng(15);
  at_every_level([&](int64_t) {
    for (int64_t n : {1, 3, 8, 16, 17, 40, 1030}) {
      for (int64_t at = 0; at<n; at = n> 100 ? at + 51 : at + 1) {
        for (float bad : {kFloatNan, kFloatInfinity}) {
          std::vector<float> z = random_floats(rng, n);
          z[at] = bad;
          const RowStats stats = row_softmax(z.data(), n, 0.9f, (at + 1) % n, true);
          ASSERT_FALSE(std::isfinite(stats.logprob)) << bad << " at " << at << " of " << n;
          ASSERT_FALSE(std::isfinite(stats.log_normaliser)) << bad << " at " << at << " of " << n;
          ASSERT_TRUE(std::isnan(stats.entropy)) << bad << " at " << at << " of " << n;
          if (std::isnan(bad)) {
            ASSERT_TRUE(std::isnan(stats.logprob) && std::isnan(stats.log_normaliser));
          }
          row_softmax_backward(z.data(), n, 0.9f, 0, stats, 1.0f, 0.5f);
          ASSERT_TRUE(std::isnan(z[at])) << bad << " at " << at << " of " << n;
        }
      }
    }
  });
}

TEST(RowMax, IsTheFirstOfTheLargest) {
  Rng rng(16);
  std::vector<int64_t> sizes = widths();
  sizes.push_back(151936);
  for (int64_t n : sizes) {
    std::vector<float> z;
    for (int64_t i = 0; i < n; ++i) z.push_back(static_cast<float>(rng.below(n / 3 + 1)) - 5.0f);
    const auto expected = std::max_element(z.begin(), z.end());
    const std::vector<float> lowest(n, -kFloatInfinity);
    at_every_level([&](int64_t) {
      const RowMax got = row_max(z.data(), n);
      ASSERT_EQ(got.value, *expected) << n;
      ASSERT_EQ(got.index, expected - z.begin()) << n;
      const RowMax low = row_max(lowest.data(), n);
      ASSERT_EQ(low.value, -kFloatInfinity) << n;
      ASSERT_EQ(low.index, 0) << n;
    });
  }
}

TEST(RowMax, PassesOverNan) {
  Rng rng(17);
  at_every_level([&](int64_t) {
    for (int64_t n : {2, 5, 16, 17, 33}) {
      for (int64_t at = 0; at < n; ++at) {
        std::vector<float> z = random_floats(rng, n);
        z[at] = -kFloatInfinity;
        const auto expected = std::max_element(z.begin(), z.end());
        const float value = *expected;
        z[at] = kFloatNan;
        const RowMax got = row_max(z.data(), n);
        ASSERT_EQ(got.value, value);
        ASSERT_EQ(got.index, expected - z.begin());
      }
    }
  });
}

TEST(RowExp, IsWithinAnUlpOrTwoOfExp) {
  std::vector<float> z;
  std::vector<double> expected;
  for (int i = 0; i < 40000; ++i) {
    const float x = static_cast<float>(-110 + i * 0.005);
    z.push_back(x);
    const double e = std::exp(static_cast<double>(x));
    expected.push_back(e > std::numeric_limits<float>::max() ? HUGE_VAL : e);
  }
  at_every_level([&](int64_t) {
    std::vector<float> e(z.size());
    row_exp(z.data(), std::ssize(z), 1.0f, 0.0f, e.data());
    ASSERT_TRUE(close_to(e, expected, [&](size_t i) { return 2 * kEps * expected[i] + 3e-45; }));
  });
}

TEST(RowExp, ScalesAndShiftsAndKeepsNan) {
  Rng rng(18);
  for (int64_t n : widths()) {
    const std::vector<float> z = random_floats(rng, n, 5.0);
    std::vector<double> expected;
    for (float value : z) expected.push_back(std::exp(static_cast<double>(value) * 0.5 - 3.0));
    at_every_level([&](int64_t) {
      std::vector<float> e(n + 1, kUntouched);
      row_exp(z.data(), n, 0.5f, 3.0f, e.data());
      ASSERT_EQ(e.back(), kUntouched);
      e.pop_back();
      ASSERT_TRUE(close_to(e, expected, [&](size_t i) { return 4e-6 * expected[i]; }));
      std::vector<float> bad = z;
      bad[n / 2] = kFloatNan, bad[0] = n > 1 ? -kFloatInfinity : kFloatNan;
      row_exp(bad.data(), n, 0.5f, 3.0f, e.data());
      ASSERT_TRUE(std::isnan(e[n / 2]));
      if (n > 1) {
        ASSERT_EQ(e[0], 0.0f);
      }
    });
    if (HasFatalFailure()) return;
  }
}

TEST(RowExp, AnElementHasTheSameBitsWhereverItLies) {
  Rng rng(19);
  const int64_t n = 61;
  const std::vector<float> z = random_floats(rng, n, 3.0);
  at_every_level([&](int64_t) {
    std::vector<float> e(n), slopes = z;
    row_exp(z.data(), n, 0.7f, 1.3f, e.data());
    const RowStats stats = row_softmax(z.data(), n, 0.7f, 0, true);
    row_softmax_backward(slopes.data(), n, 0.7f, 0, stats, 0.9f, 0.2f);
    for (int64_t i = 0; i < n; ++i) {
      float one;
      row_exp(&z[i], 1, 0.7f, 1.3f, &one);
      ASSERT_TRUE(same_bits({&one, 1}, {&e[i], 1})) << i;
      if (i == 0) continue;  // the target
      std::vector<float> two = {z[0], z[i]};
      row_softmax_backward(two.data(), 2, 0.7f, 0, stats, 0.9f, 0.2f);
      ASSERT_TRUE(same_bits({&two[1], 1}, {&slopes[i], 1})) << i;
    }
  });
}

}  // namespace
}  // namespace leeway
