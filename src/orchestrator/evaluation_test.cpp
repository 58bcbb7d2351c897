#include "orchestrator/evaluation.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <map>

#include "base/rng.h"

namespace leeway {
namespace {

TEST(PassAtK, IsTheShareOfChoicesWithASuccess) {
  for (int64_t n = 1; n <= 10; ++n) {
    for (int64_t successes = 0; successes <= n; ++successes) {
      std::vector<int64_t> all(static_cast<size_t>(n + 1)), right(static_cast<size_t>(n + 1));
      for (uint32_t choice = 0; choice < (1u << n); ++choice) {
        const auto k = static_cast<size_t>(__builtin_popcount(choice));
        ++all[k];
        right[k] += (choice & ((1u << successes) - 1)) != 0 ? 1 : 0;
      }
      for (int64_t k = 1; k <= n; ++k) {
        const auto i = static_cast<size_t>(k);
        EXPECT_NEAR(pass_at_k(n, successes, k),
                    static_cast<double>(right[i]) / static_cast<double>(all[i]), 1e-12);
      }
    }
  }
  EXPECT_NEAR(pass_at_k(100000, 1, 50000), 0.5, 1e-9) << "no factorial overflows";
}

std::vector<double> zeros_and_ones(size_t n, size_t ones) {
  std::vector<double> values(n);
  std::fill_n(values.begin(), ones, 1.0);
  return values;
}

TEST(Estimate, OfZerosAndOnesIsWilsons) {
  struct Case {
    size_t n, ones;
    double low, high;
  };
  for (const Case& c : std::vector<Case>{{10, 0, 0.0, 0.27753},
                                         {10, 10, 0.72247, 1.0},
                                         {10, 5, 0.23659, 0.76341},
                                         {100, 50, 0.40383, 0.59617},
                                         {100, 99, 0.94551, 0.99823},
                                         {1, 1, 0.20655, 1.0},
                                         {1, 0, 0.0, 0.79345}}) {
    const Estimate value = estimate(zeros_and_ones(c.n, c.ones));
    EXPECT_NEAR(value.mean, static_cast<double>(c.ones) / static_cast<double>(c.n), 1e-12);
    EXPECT_NEAR(value.low, c.low, 2e-5) << c.ones << " of " << c.n;
    EXPECT_NEAR(value.high, c.high, 2e-5) << c.ones << " of " << c.n;
  }
}

TEST(Estimate, OfSharesStaysAmongThem) {
  Rng rng(5);
  for (int i = 0; i < 3000; ++i) {
    std::vector<double> values(1 + rng.below(20));
    const double scale = std::pow(rng.uniform(), 4.0);
    const bool high = rng.below(2) == 0;
    for (double& value : values) {
      value = rng.below(3) == 0 ? 0.0 : scale * rng.uniform();
      if (high) value = 1.0 - value;
    }
    const Estimate result = estimate(values);
    EXPECT_LE(0.0, result.low);
    EXPECT_LE(result.low, result.mean);
    EXPECT_LE(result.mean, result.high);
    EXPECT_LE(result.high, 1.0);
    EXPECT_TRUE(std::isfinite(result.low) && std::isfinite(result.high));
  }
}

TEST(Estimate, OfEqualSharesIsNoSurerThanTheirNumber) {
  for (const double share : {0.1, 0.3, 1.0 / 3.0, 0.5, 0.7}) {
    for (const size_t n : {1u, 3u, 10u, 30u}) {
      const Estimate value = estimate(std::vector<double>(n, share));
      EXPECT_GT(value.high - value.low, 0.2) << share << " x " << n;
    }
  }
}

TEST(Estimate, OfOtherValuesIsTheNormalOne) {
  const Estimate value = estimate({-1.0, 0.0, 1.0, 2.0, 3.0});
  const double half = 1.959963984540054 * std::sqrt(2.5 / 5.0);
  EXPECT_NEAR(value.mean, 1.0, 1e-12);
  EXPECT_NEAR(value.low, 1.0 - half, 1e-12);
  EXPECT_NEAR(value.high, 1.0 + half, 1e-12);
  const Estimate one = estimate({-3.5});
  EXPECT_EQ(one.low, -3.5);
  EXPECT_EQ(one.high, -3.5);
}

TEST(Estimate, HoldsTheTruthNineteenTimesInTwenty) {
  Rng rng(11);
  // `draw` gives a value whose mean is the truth.
  const auto coverage = [&](double truth, size_t n, const std::function<double()>& draw) {
    int held = 0;
    for (int trial = 0; trial < 2000; ++trial) {
      std::vector<double> values(n);
      for (double& value : values) value = draw();
      const Estimate result = estimate(values);
      held += result.low <= truth && truth <= result.high ? 1 : 0;
    }
    return held / 2000.0;
  };
  for (const double p : {0.05, 0.3, 0.5, 0.9}) {
    const double binary = coverage(p, 60, [&] { return rng.uniform() < p ? 1.0 : 0.0; });
    EXPECT_GT(binary, 0.92) << p;
    EXPECT_LT(binary, 0.99) << p;
    // Means of four samples of prompts that differ.
    const double shares = coverage(p, 60, [&] {
      const double own = rng.uniform() < 0.5 ? p - p * (1 - p) : p + p * (1 - p);
      double sum = 0.0;
      for (int i = 0; i < 4; ++i) sum += rng.uniform() < own ? 0.25 : 0.0;
      return sum;
    });
    EXPECT_GT(shares, 0.91) << p;
  }
  EXPECT_NEAR(coverage(3.0, 60, [&] { return 3.0 + 5.0 * rng.normal(); }), 0.945, 0.025);
}

TEST(EvaluationMetrics, AreOfAllAndOfEachEnvironment) {
  std::vector<PromptResult> results = {
      {.environment = 0, .rewards = {1.0, 0.0, 0.0, 1.0}, .successes = 2},
      {.environment = 0, .rewards = {0.0, 0.0}, .successes = 0, .failures = 2},
      {.environment = 1, .rewards = {1.5, 1.5, 1.5, 1.5}, .successes = 4},
      {.environment = 1, .rewards = {}, .failures = 4}};
  std::map<std::string, double> metrics;
  for (const auto& [name, value] : evaluation_metrics(results, {"a", "b", "none"}, false)) {
    EXPECT_TRUE(metrics.emplace(name, value).second) << name;
  }
  const std::map<std::string, double> expected = {
      {"eval/all/reward/mean", 2.0 / 3},
      {"eval/a/reward/mean", 0.25},
      {"eval/b/reward/mean", 1.5},
      {"eval/a/pass@1", 0.25},
      {"eval/a/pass@2", 5.0 / 12},  // 5/6 and 0
      {"eval/a/pass@4", 1.0},       // of the prompt that has four
      {"eval/b/pass@4", 1.0},
      {"eval/all/prompts", 3.0},
      {"eval/a/prompts", 2.0},
      {"eval/b/prompts", 1.0},
      {"eval/all/failed_rollouts", 6.0},
      {"eval/b/failed_rollouts", 4.0}};
  for (const auto& [name, value] : expected) {
    ASSERT_TRUE(metrics.contains(name)) << name;
    EXPECT_NEAR(metrics[name], value, 1e-12) << name;
  }
  for (const char* name : {"eval/a/reward", "eval/a/pass@2", "eval/all/pass@1"}) {
    EXPECT_TRUE(metrics.contains(std::string(name) + "/low")) << name;
    EXPECT_TRUE(metrics.contains(std::string(name) + "/high")) << name;
  }
  for (const auto& [name, value] : metrics) {
    EXPECT_EQ(name.find("/none/"), std::string::npos) << name;
    EXPECT_EQ(name.find("pass@3"), std::string::npos) << name;
  }
  const Metrics greedy = evaluation_metrics(results, {"a", "b"}, true);
  ASSERT_EQ(greedy.size(), 6u);
  EXPECT_EQ(greedy[0].first, "eval/all/greedy/mean");
  EXPECT_NEAR(metric_of(greedy, "eval/a/greedy/mean"), 0.25, 1e-12);
  EXPECT_EQ(metric_of(greedy, "eval/b/greedy/failed_rollouts"), 4.0);
}

TEST(EvaluationMetrics, OfNothingButFailuresAreTheirCounts) {
  const std::vector<PromptResult> results = {{.environment = 0, .rewards = {}, .failures = 4}};
  const Metrics metrics = evaluation_metrics(results, {"a", "b"}, false);
  EXPECT_EQ(metrics, (Metrics{{"eval/all/prompts", 0.0},
                              {"eval/all/failed_rollouts", 4.0},
                              {"eval/a/prompts", 0.0},
                              {"eval/a/failed_rollouts", 4.0}}));
}

}  // namespace
}  // namespace leeway
