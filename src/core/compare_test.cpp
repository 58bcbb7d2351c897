// Side by side on a batch whose answers are known, and what `explain` says.

#include "core/compare.h"

#include <gtest/gtest.h>

#include "core/example_batch.h"
#include "core/explain.h"
#include "core/test_support.h"
#include "leeway/error.h"

namespace leeway {
namespace {

const Catalog catalog;

TEST(Compare, EveryPresetHasARowAndTheUncorrectedOnePointsAtItself) {
  const Batch batch = example_batch(32, 40, 3);
  const auto requests = default_requests(catalog, batch);
  size_t called = 0;
  const Comparison c =
      compare_presets(catalog, batch, requests, 0.005, [&](size_t done, size_t) { called = done; });
  EXPECT_EQ(called, requests.size());
  ASSERT_EQ(c.presets.size(), requests.size());
  for (const ComparedPreset& p : c.presets) {
    EXPECT_TRUE(p.unavailable.empty()) << p.preset << ": " << p.unavailable;
    EXPECT_GE(p.kept_share, 0.0);
    EXPECT_LE(p.kept_share, 1.0);
    EXPECT_LE(std::abs(p.grad_cosine), 1.0 + 1e-12);
    if (p.preset == "reinforce") {
      EXPECT_NEAR(p.grad_cosine, 1.0, 1e-12);
      EXPECT_EQ(p.kept_share, 1.0);
      EXPECT_NEAR(p.effective_sample_size, 1.0, 1e-12);
    }
    // A found threshold masks at most what was asked for, and nearly that at token level.
    if (p.target) {
      EXPECT_LE(p.target->masked, 0.005 + 1e-12) << p.preset;
    }
    if (p.target && (p.preset == "icepop" || p.preset == "dppo_tv" || p.preset == "kpop")) {
      EXPECT_GT(p.target->masked, 0.003) << p.preset;
    }
  }
}

TEST(Compare, PresetsTheBatchCannotFeedSayWhatTheyNeed) {
  Batch batch = example_batch(8, 20, 3);
  batch.prox.clear();
  const Comparison c =
      compare_presets(catalog, batch, {{"grpo+tis", {}}, {"icepop", {}}}, {}, nullptr);
  EXPECT_EQ(c.presets[0].unavailable, "needs the stream prox");
  EXPECT_TRUE(c.presets[1].unavailable.empty());
  // Without prox the defaults compare against rollout where they can.
  for (const PresetRequest& request : default_requests(catalog, batch)) {
    if (request.preset == "ppo") {
      EXPECT_EQ(request.settings.size(), 1u);
    }
  }
}

TEST(Compare, KeptSharesAndBandsAreCountedByHand) {
  Batch batch;
  batch.offsets = {0, 4};
  batch.rollout = {std::log(0.95), std::log(0.6), std::log(0.005), std::log(0.05)};
  batch.pi = {std::log(0.95), std::log(0.1), std::log(0.05), std::log(0.05)};
  batch.advantages = {1.0, -1.0, 1.0, 1.0};
  const Comparison c = compare_presets(catalog, batch, {{"icepop", {}}}, {}, nullptr);
  const ComparedPreset& p = c.presets[0];
  EXPECT_EQ(p.kept_share, 0.5);  // ratios 1, 1/6, 10, 1
  EXPECT_NEAR(p.kept_positive, 2.0 / 3, 1e-12);
  EXPECT_EQ(p.kept_negative, 0.0);
  EXPECT_EQ(p.kept_by_band[0], 0.0);
  EXPECT_EQ(p.kept_by_band[1], 1.0);
  EXPECT_TRUE(std::isnan(p.kept_by_band[2]));
  EXPECT_EQ(p.kept_by_band[3], 0.0);
  EXPECT_EQ(p.kept_by_band[4], 1.0);
}

TEST(Compare, TheExampleBatchIsTheSameEverywhere) {
  const Batch a = example_batch(16, 30, 9), b = example_batch(16, 30, 9);
  EXPECT_EQ(a.pi, b.pi);
  EXPECT_EQ(a.rollout, b.rollout);
  for (size_t i = 0; i < a.pi.size(); ++i) {
    EXPECT_LE(a.pi[i], 0.0);
    EXPECT_LE(a.rollout[i], 0.0);
  }
}

TEST(Explain, SaysWhatEveryPresetDropsAndDividesBy) {
  for (const testing::NamedPreset& preset : testing::native_list(catalog)) {
    const Explanation e = explain(catalog.make_spec(preset.preset, preset.settings));
    EXPECT_FALSE(e.objective.empty()) << preset.label();
    EXPECT_FALSE(e.dropped.empty()) << preset.label();
    EXPECT_FALSE(e.gradient.empty()) << preset.label();
    EXPECT_FALSE(e.denominator.empty()) << preset.label();
    EXPECT_FALSE(e.streams.empty()) << preset.label();
  }
  for (const testing::NamedPreset& preset : testing::foreign_list(catalog)) {
    EXPECT_FALSE(explain(catalog.make_spec(preset.preset, preset.settings)).objective.empty());
  }
}

TEST(Explain, PrintsTheNumbersInForce) {
  const Explanation e =
      explain(catalog.make_spec("ipo_kl", {{"ipo_ratio_high", 3.0, ""}, {"kl_tau", 0.25, ""}}));
  EXPECT_EQ(e.objective[0], "L = 1/N sum_t [ keep_t (-A_t r_t) + keep_t 0.25 log(pi/rollout)^2 ]");
  EXPECT_EQ(e.objective[2], "keep_t = 1 where 0.2 <= pi/rollout <= 3");
  EXPECT_NE(e.dropped[0].find("lose their policy term and their penalty"), std::string::npos);
}

}  // namespace
}  // namespace leeway
