#include "core/weight_metrics.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "core/test_support.h"

namespace leeway {
namespace {

// One sequence with log prox - log rollout as given, all trained but the last.
Batch batch_of(const std::vector<double>& log_ratios) {
  Batch batch;
  for (const double x : log_ratios) {
    batch.pi.push_back(-1.0);
    batch.prox.push_back(-1.0);
    batch.rollout.push_back(-1.0 - x);
    batch.advantages.push_back(1.0);
    batch.mask.push_back(1);
  }
  batch.mask.back() = 0;
  batch.offsets.push_back(static_cast<int64_t>(log_ratios.size()));
  return batch;
}

LossSpec spec_of(const testing::NamedPreset& named) {
  return Catalog().make_spec(named.preset, named.settings);
}

std::map<std::string, double> metrics_of(const LossSpec& spec, const Batch& batch) {
  const LossResult result = evaluate_reference(spec, batch.view(), {}, nullptr, true);
  const Metrics metrics = weight_metrics(spec, batch.view(), result);
  return {metrics.begin(), metrics.end()};
}

TEST(WeightMetrics, CountWhatACapOrABandChanges) {
  const Batch batch = batch_of({0.0, std::log(2.0), std::log(8.0), std::log(0.25), 9.0});
  auto capped = metrics_of(spec_of(testing::with("ppo+tis", {{"tis_cap", 5.0}})), batch);
  EXPECT_DOUBLE_EQ(capped["weight_clipped_share"], 1.0 / 4);  // 8 -> 5
  EXPECT_NEAR(capped["weight_abs_deviation"], (0 + 1 + 4 + 0.75) / 4, 1e-12);
  auto band = metrics_of(spec_of(testing::with("ppo+icepop_tis")), batch);
  EXPECT_DOUBLE_EQ(band["weight_clipped_share"], 2.0 / 4);  // 8 and 0.25 -> 0
  EXPECT_NEAR(band["weight_abs_deviation"], (0 + 1 + 1 + 1) / 4.0, 1e-12);
}

TEST(WeightMetrics, OfAWholeSequenceClipAllOfIt) {
  const Batch batch = batch_of({std::log(2.0), std::log(4.0), 0.0});
  auto metrics = metrics_of(
      spec_of(testing::with("ppo+tis", {{"tis_cap", 5.0}, {"tis_level", std::string("sequence")}})),
      batch);
  EXPECT_DOUBLE_EQ(metrics["weight_clipped_share"], 1.0);
  EXPECT_NEAR(metrics["weight_abs_deviation"], 4.0, 1e-12);
}

TEST(WeightMetrics, DoNotSeePrompts) {
  const Batch batch = testing::random_batch(3, {6, 4, 9}, true);
  const LossSpec spec = spec_of(testing::with("ppo+tis", {{"tis_cap", 1.0}}));
  const auto bare = metrics_of(spec, batch);
  EXPECT_GT(bare.at("weight_clipped_share"), 0.0);
  EXPECT_EQ(metrics_of(spec, testing::behind_prompts(batch)), bare);
}

TEST(WeightMetrics, OfUnitWeightsAreZeroAndOfNoWeightsAreAbsent) {
  const Batch batch = batch_of({0.0, 0.0, 3.0});
  auto metrics = metrics_of(spec_of(testing::with("ppo+tis")), batch);
  EXPECT_EQ(metrics["weight_clipped_share"], 0.0);
  EXPECT_EQ(metrics["weight_abs_deviation"], 0.0);
  EXPECT_TRUE(metrics_of(spec_of(testing::with("ppo")), batch).empty());
  Batch masked = batch;
  masked.mask.assign(3, 0);
  EXPECT_TRUE(
      std::isnan(metrics_of(spec_of(testing::with("ppo+tis")), masked)["weight_clipped_share"]));
}

}  // namespace
}  // namespace leeway
