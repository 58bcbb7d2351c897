#include "run/run_warnings.h"

#include <gtest/gtest.h>

#include <cmath>

namespace leeway {
namespace {

constexpr uint64_t kMega = 1'000'000;

Metrics step(double flat, double truncated, double masked, double mismatch) {
  return {{"zero_advantage_groups", flat},
          {"is_truncated/all", truncated},
          {"is_masked", masked},
          {"mismatch_kl/all/mean", mismatch}};
}

Metrics evaluation(double low, double mean, double high) {
  return {
      {"eval/all/reward/low", low}, {"eval/all/reward/mean", mean}, {"eval/all/reward/high", high}};
}

void expect_one(const std::vector<std::string>& said, const std::vector<std::string>& words) {
  ASSERT_EQ(said.size(), 1u);
  EXPECT_TRUE(said[0].starts_with("warning: ")) << said[0];
  for (const std::string& word : words) {
    EXPECT_NE(said[0].find(word), std::string::npos) << "no \"" << word << "\" in: " << said[0];
  }
}

TEST(RunWarnings, SayNothingOfAHealthyRun) {
  RunWarnings warnings(10, 10 * kMega);
  for (int i = 0; i < 20; ++i) {
    EXPECT_TRUE(warnings.on_step(step(5, 0.2, 0.01 * (i % 3), 0.001 * (1 + i))).empty()) << i;
  }
  EXPECT_TRUE(
      warnings.on_evaluation(5, evaluation(0.2, 0.3, 0.4), evaluation(0.1, 0.15, 0.25)).empty());
  EXPECT_TRUE(warnings.on_disk(1000 * kMega).empty());
}

TEST(RunWarnings, OfGroupsWithoutAdvantageComeOnce) {
  RunWarnings warnings(10, 0);
  EXPECT_TRUE(warnings.on_step(step(10, 0, 0, 0)).empty()) << "one batch says little";
  EXPECT_TRUE(warnings.on_step(step(9, 0, 0, 0)).empty());
  expect_one(warnings.on_step(step(10, 0, 0, 0)), {"97 %", "group_size", "temperature"});
  EXPECT_TRUE(warnings.on_step(step(10, 0, 0, 0)).empty()) << "said twice";
}

TEST(RunWarnings, OfTruncatedRollouts) {
  RunWarnings warnings(10, 0);
  warnings.on_step(step(0, 0.4, 0, 0));
  EXPECT_TRUE(warnings.on_step(step(0, 0.4, 0, 0)).empty());
  EXPECT_TRUE(warnings.on_step(step(0, 0.6, 0, 0)).empty());
  expect_one(warnings.on_step(step(0, 0.8, 0, 0)), {"60 %", "rollout.max_new_tokens"});
}

TEST(RunWarnings, OfTruncatedRolloutsNameTheLimitThatCutThem) {
  const auto warned = [](const CutRollouts& cut) {
    RunWarnings warnings(10, 0);
    for (int i = 0; i < 2; ++i) warnings.on_step(step(0, 1, 0, 0), cut);
    return warnings.on_step(step(0, 1, 0, 0), cut);
  };
  CutRollouts cut{.by_new_tokens = 3,
                  .by_positions = 2,
                  .by_turns = 1,
                  .max_new_tokens = 64,
                  .positions = 512,
                  .max_turns = 4};
  expect_one(warned(cut), {"100 %", "by rollout.max_new_tokens = 64; raise it", "rollout.stop"});
  cut.by_positions = 5;
  expect_one(warned(cut), {"by the model's 512 positions", "shorter prompts"});
  cut.by_turns = 8;
  expect_one(warned(cut), {"by orchestrator.max_turns = 4"});
}

TEST(RunWarnings, OfABatchWithoutATokenToTrainOn) {
  RunWarnings warnings(10, 0);
  const auto batch = [&](double samples, double trained) {
    return warnings.on_step({{"batch/samples", samples}, {"batch/trained_tokens", trained}});
  };
  EXPECT_TRUE(batch(8, 100).empty());
  EXPECT_TRUE(batch(0, 0).empty()) << "filtered, which other numbers tell";
  expect_one(batch(8, 0), {"\"train\": false", "rollout.temperature"});
  EXPECT_TRUE(batch(8, 0).empty()) << "said twice";
}

TEST(RunWarnings, OfMaskedTokensAndMismatchAreBesideTheFirstStep) {
  RunWarnings warnings(10, 0);
  EXPECT_TRUE(warnings.on_step(step(0, 0, 0.3, 0.5)).empty()) << "a preset may begin like this";
  EXPECT_TRUE(warnings.on_step(step(0, 0, 0.4, 2.0)).empty());
  expect_one(warnings.on_step(step(0, 0, 0.6, 2.0)), {"60 %", "30 %", "trainer.learning_rate"});
  expect_one(warnings.on_step(step(0, 0, 0.6, 6.0)), {"mismatch_kl is 6", "0.5"});
  EXPECT_TRUE(warnings.on_step(step(0, 0, 0.9, 60.0)).empty()) << "said twice";
}

TEST(RunWarnings, LeaveOutWhatALossDoesNotTell) {
  RunWarnings warnings(10, 0);
  const double none = std::nan("");
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(warnings.on_step(step(none, none, none, none)).empty());
  EXPECT_TRUE(warnings.on_step({}).empty());
  EXPECT_TRUE(warnings.on_evaluation(1, {}, evaluation(0, 0, 0)).empty());
  EXPECT_TRUE(warnings.on_evaluation(1, evaluation(1, 1, 1), {}).empty());
}

TEST(RunWarnings, OfAnEvaluationBelowItsStart) {
  RunWarnings warnings(10, 0);
  expect_one(warnings.on_evaluation(20, evaluation(0.3, 0.4, 0.5), evaluation(0.1, 0.2, 0.29)),
             {"step 20", "0.200", "0.400", "trainer.learning_rate"});
  EXPECT_TRUE(
      warnings.on_evaluation(40, evaluation(0.3, 0.4, 0.5), evaluation(0, 0.1, 0.2)).empty());
}

TEST(RunWarnings, OfADiskThatIsNearlyFull) {
  RunWarnings warnings(10, 100 * kMega);
  EXPECT_TRUE(warnings.on_disk(301 * kMega).empty());
  expect_one(warnings.on_disk(299 * kMega), {"299.0 MB", "100.0 MB", "checkpoint.keep_last"});
  EXPECT_TRUE(warnings.on_disk(0).empty()) << "said twice";
}

}  // namespace
}  // namespace leeway
