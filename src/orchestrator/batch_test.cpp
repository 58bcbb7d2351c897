#include "orchestrator/batch.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>

namespace leeway {
namespace {

TrajectoryStep step_of(std::vector<int32_t> prompt, std::vector<int32_t> completion,
                       std::vector<int32_t> versions) {
  TrajectoryStep step;
  step.prompt = std::move(prompt);
  step.logprobs.assign(completion.size(), -0.5f);
  step.completion = std::move(completion);
  step.versions = std::move(versions);
  return step;
}

Rollout rollout_of(std::vector<TrajectoryStep> steps, std::vector<RewardPart> parts,
                   bool truncated = false) {
  Rollout rollout;
  rollout.steps = std::move(steps);
  for (const RewardPart& part : parts) rollout.reward += part.weight * part.value;
  rollout.rewards = std::move(parts);
  rollout.truncated = truncated;
  return rollout;
}

// Three groups: rewards 1.5 and 0; equal ones; one of another environment with a rollout of two
// training samples. Update 4, by weights of version 3.
std::vector<Group> hand_made() {
  std::vector<Group> groups(3);
  groups[0].rollouts = {
      rollout_of({step_of({1, 2}, {3, 4}, {3, 3})}, {{"exact", 1.0, 1.0}, {"format", 0.5, 1.0}}),
      rollout_of({step_of({1, 2}, {5}, {1})}, {{"exact", 1.0, 0.0}, {"format", 0.5, 0.0}}, true)};
  groups[1].rollouts = {rollout_of({step_of({7}, {8, 9, 10}, {2, 2, 3})}, {{"exact", 1.0, 1.0}}),
                        rollout_of({step_of({7}, {8}, {3})}, {{"exact", 1.0, 1.0}})};
  groups[2].environment = 1;
  groups[2].rollouts = {
      rollout_of({step_of({1}, {2}, {3}), step_of({1, 2, 4}, {5}, {3})}, {{"exact", 2.0, 1.0}}),
      rollout_of({step_of({1}, {2, 3}, {3, 3}), step_of({1, 2, 9}, {5}, {3})}, {})};
  return groups;
}

const std::vector<std::string> kIds = {"sort", "talk", "never"};

std::map<std::string, double> metrics_of(const PreparedBatch& batch) {
  std::map<std::string, double> metrics;
  for (const auto& [name, value] : batch.metrics) {
    EXPECT_TRUE(metrics.emplace(name, value).second) << name << " is there twice";
  }
  return metrics;
}

TEST(Batch, GivesEachRolloutItsAdvantage) {
  const PreparedBatch batch = prepare_batch(4, hand_made(), kIds, {.temperature = 0.7f});
  EXPECT_EQ(batch.learner.step, 4);
  EXPECT_EQ(batch.groups.size(), 3u);
  EXPECT_EQ(batch.advantages,
            (std::vector<std::vector<double>>{{0.75, -0.75}, {0.0, 0.0}, {1.0, -1.0}}));
  EXPECT_EQ(batch.first_sample, (std::vector<size_t>{0, 1, 2, 3, 4, 5, 7}));
  ASSERT_EQ(batch.learner.samples.size(), 7u);
  const std::vector<double> advantages = {0.75, -0.75, 0.0, 0.0, 1.0, -1.0, -1.0};
  const std::vector<int32_t> rollouts = {0, 1, 2, 3, 4, 5, 5};
  for (size_t i = 0; i < 7; ++i) {
    EXPECT_EQ(batch.learner.samples[i].advantages,
              std::vector<float>{static_cast<float>(advantages[i])});
    EXPECT_EQ(batch.learner.samples[i].rollout_id, rollouts[i]);
    EXPECT_EQ(batch.learner.samples[i].temperature, 0.7f);
  }
  EXPECT_EQ(batch.learner.samples[0].ids, (std::vector<int32_t>{1, 2, 3, 4}));
  EXPECT_EQ(batch.learner.samples[0].versions, (std::vector<int32_t>{-1, -1, 3, 3}));
  EXPECT_EQ(batch.learner.samples[4].ids, (std::vector<int32_t>{1, 2, 4, 5}));
  EXPECT_EQ(batch.learner.samples[4].loss_mask, (std::vector<uint8_t>{0, 1, 0, 1}));
  EXPECT_EQ(batch.sampled_tokens, 12);
}

TEST(Batch, LeavesOutGroupsWithoutAnAdvantageWhereAsked) {
  const PreparedBatch batch = prepare_batch(4, hand_made(), kIds, {.filter_zero_advantages = true});
  EXPECT_EQ(batch.first_sample, (std::vector<size_t>{0, 1, 2, 2, 2, 3, 5}));
  ASSERT_EQ(batch.learner.samples.size(), 5u);
  EXPECT_EQ(batch.learner.samples[2].rollout_id, 4) << "numbers go through all groups";
  for (const Sample& sample : batch.learner.samples) EXPECT_NE(sample.advantage(0), 0.0f);
  auto metrics = metrics_of(batch);
  EXPECT_EQ(metrics["filtered_groups"], 1.0);
  EXPECT_EQ(metrics["zero_advantage_groups"], 1.0);
  EXPECT_EQ(metrics["batch/rollouts"], 4.0) << "what the update sees";
  EXPECT_EQ(metrics["batch/samples"], 5.0);
  EXPECT_NEAR(metrics["reward/all/mean"], 5.5 / 6, 1e-12) << "rewards are of all rollouts";
}

TEST(Batch, MeasuresWhatIsInIt) {
  auto metrics = metrics_of(prepare_batch(4, hand_made(), kIds, {}));
  const std::map<std::string, double> expected = {
      {"reward/all/mean", 5.5 / 6},
      {"reward/all/max", 2.0},
      {"reward/all/min", 0.0},
      {"reward/sort/mean", 3.5 / 4},
      {"reward/sort/max", 1.5},
      {"reward/sort/min", 0.0},
      {"reward/sort/exact", 3.0 / 4},
      {"reward/sort/format", 0.5},
      {"reward/talk/mean", 1.0},
      {"reward/talk/max", 2.0},
      {"reward/talk/min", 0.0},
      {"reward/talk/exact", 1.0},
      // Lags 0 0 | 2 | 1 1 0 | 0 | 0 0 | 0 0 0.
      {"off_policy_level/all/mean", 4.0 / 12},
      {"off_policy_level/all/max", 2.0},
      {"off_policy_level/sort/mean", 4.0 / 7},
      {"off_policy_level/sort/max", 2.0},
      {"off_policy_level/talk/mean", 0.0},
      {"off_policy_level/talk/max", 0.0},
      {"samples_per_rollout", 7.0 / 6},
      {"prefix_breaks/sampled_tokens_changed", 1.0},
      {"prefix_breaks/all", 1.0},
      {"turns/all/mean", 8.0 / 6},
      {"turns/all/max", 2.0},
      {"seq_len/all/mean", (4 + 3 + 4 + 2 + 4 + 3 + 4) / 7.0},
      {"seq_len/all/max", 4.0},
      {"decode_len/all/mean", 2.0},
      {"decode_len/all/max", 3.0},
      {"is_truncated/all", 1.0 / 6},
      {"is_truncated/sort", 1.0 / 4},
      {"is_truncated/talk", 0.0},
      {"singleton_groups", 0.0},
      {"zero_advantage_groups", 1.0},
      {"filtered_groups", 0.0},
      {"batch/rollouts", 6.0},
      {"batch/samples", 7.0},
  };
  for (const auto& [name, value] : expected) {
    ASSERT_TRUE(metrics.contains(name)) << name;
    EXPECT_NEAR(metrics[name], value, 1e-12) << name;
  }
  EXPECT_EQ(metrics.size(), expected.size()) << "an environment without a rollout has no number";
}

TEST(Batch, LeavesOutRewardsOfZeroWhereThereIsNoBaseline) {
  const PreparedBatch batch =
      prepare_batch(4, hand_made(), kIds,
                    {.advantage = {.kind = AdvantageKind::none}, .filter_zero_advantages = true});
  auto metrics = metrics_of(batch);
  EXPECT_EQ(metrics["filtered_groups"], 0.0) << "equal rewards of 1 are a signal";
  EXPECT_EQ(batch.advantages[1], (std::vector<double>{1.0, 1.0}));
  std::vector<Group> groups = hand_made();
  for (Rollout& rollout : groups[1].rollouts) rollout.reward = 0.0;
  const PreparedBatch filtered =
      prepare_batch(4, groups, kIds,
                    {.advantage = {.kind = AdvantageKind::none}, .filter_zero_advantages = true});
  EXPECT_EQ(metrics_of(filtered)["filtered_groups"], 1.0);
  EXPECT_EQ(filtered.filtered_rollouts, 2);
}

TEST(Batch, CountsGroupsOfOne) {
  std::vector<Group> groups(1);
  groups[0].rollouts = {rollout_of({step_of({1}, {2}, {0})}, {{"exact", 1.0, 1.0}})};
  const PreparedBatch kept = prepare_batch(1, groups, kIds, {});
  EXPECT_EQ(kept.learner.samples.size(), 1u);
  EXPECT_EQ(metrics_of(kept)["singleton_groups"], 1.0);
  const PreparedBatch empty = prepare_batch(1, groups, kIds, {.filter_zero_advantages = true});
  EXPECT_TRUE(empty.learner.samples.empty());
  EXPECT_EQ(empty.first_sample, (std::vector<size_t>{0, 0}));
  EXPECT_EQ(metrics_of(empty)["filtered_groups"], 1.0);
}

}  // namespace
}  // namespace leeway
