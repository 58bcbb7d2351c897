#include "orchestrator/credit.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "base/rng.h"
#include "orchestrator/batch.h"

namespace leeway {
namespace {

constexpr AdvantageKind kAll[] = {AdvantageKind::group_mean,    AdvantageKind::group_deviation,
                                  AdvantageKind::leave_one_out, AdvantageKind::max_rl,
                                  AdvantageKind::reinforce_pp,  AdvantageKind::batch_mean,
                                  AdvantageKind::none};
const std::vector<std::string> kIds = {"env"};

// Steps whose prompts extend each other, with completions of 1 to 3 tokens.
Rollout random_rollout(Rng& rng, size_t steps) {
  Rollout rollout;
  std::vector<int32_t> context = {1, 2};
  for (size_t k = 0; k < steps; ++k) {
    TrajectoryStep& step = rollout.steps.emplace_back();
    step.prompt = context;
    for (size_t t = 0; t < 1 + rng.below(3); ++t) {
      step.completion.push_back(static_cast<int32_t>(10 + rng.below(5)));
    }
    step.logprobs.assign(step.completion.size(), -0.5f);
    step.versions.assign(step.completion.size(), 0);
    context.insert(context.end(), step.completion.begin(), step.completion.end());
    context.push_back(3);  // the environment's answer
  }
  return rollout;
}

void set_turn_rewards(Rollout& rollout, const std::vector<double>& rewards, double at_end) {
  rollout.credit.resize(rewards.size());
  rollout.reward = at_end;
  for (size_t k = 0; k < rewards.size(); ++k) {
    rollout.credit[k].reward = rewards[k];
    rollout.reward += rewards[k];
  }
}

std::vector<Group> random_groups(Rng& rng, size_t steps) {
  std::vector<Group> groups(1 + rng.below(4));
  for (Group& group : groups) {
    for (size_t r = 0; r < 1 + rng.below(5); ++r) {
      group.rollouts.push_back(random_rollout(rng, steps > 0 ? steps : 1 + rng.below(4)));
    }
  }
  return groups;
}

TEST(Credit, OfTurnRewardsOnTheLastStepIsThatOfTheOutcome) {
  Rng rng(1);
  for (int round = 0; round < 100; ++round) {
    std::vector<Group> groups = random_groups(rng, 3);
    for (Group& group : groups) {
      for (Rollout& rollout : group.rollouts) set_turn_rewards(rollout, {0, 0, rng.normal()}, 0.5);
    }
    std::vector<Group> outcome = groups;
    for (Group& group : outcome) {
      for (Rollout& rollout : group.rollouts) rollout.credit.clear();
    }
    for (const AdvantageKind kind : kAll) {
      const BatchOptions options{.advantage = {.kind = kind, .length_penalty = 0.25}};
      const PreparedBatch got = prepare_batch(1, groups, kIds, options);
      const PreparedBatch expected = prepare_batch(1, outcome, kIds, options);
      ASSERT_EQ(got.learner.samples.size(), expected.learner.samples.size());
      EXPECT_EQ(got.advantages, expected.advantages);
      for (size_t s = 0; s < got.learner.samples.size(); ++s) {
        const Sample& sample = got.learner.samples[s];
        for (size_t t = 0; t < sample.ids.size(); ++t) {
          EXPECT_EQ(sample.advantage(t), expected.learner.samples[s].advantage(t));  // to the bit
        }
      }
    }
  }
}

TEST(Credit, OfATurnIsTheReturnFromItOn) {
  Group group;
  Rng rng(2);
  for (int r = 0; r < 2; ++r) group.rollouts.push_back(random_rollout(rng, 3));
  group.rollouts.push_back(random_rollout(rng, 1));
  set_turn_rewards(group.rollouts[0], {1, 2, 4}, 8);  // returns 15, 14, 12
  set_turn_rewards(group.rollouts[1], {0, 1, 0}, 1);  // returns 2, 2, 1
  group.rollouts[2].reward = 1.0;                     // no turn rewards, one step
  const std::vector<Group> groups = {group};
  const auto raw = turn_advantages(groups, {.kind = AdvantageKind::none});
  EXPECT_EQ(raw[0], (std::vector<std::vector<double>>{{15, 14, 12}, {2, 2, 1}, {1}}));
  const auto mean = turn_advantages(groups, {.kind = AdvantageKind::group_mean});
  // Turns 2 and 3 compare the two rollouts that have them.
  EXPECT_EQ(mean[0], (std::vector<std::vector<double>>{{9, 6, 5.5}, {-4, -6, -5.5}, {-5}}));
}

TEST(Credit, LosesNoReward) {
  Rng rng(3);
  for (int round = 0; round < 200; ++round) {
    std::vector<Group> groups = random_groups(rng, 0);
    for (Group& group : groups) {
      for (Rollout& rollout : group.rollouts) {
        std::vector<double> rewards(rollout.steps.size());
        for (double& reward : rewards) reward = rng.normal();
        set_turn_rewards(rollout, rewards, rng.normal());
      }
    }
    const auto returns = turn_advantages(groups, {.kind = AdvantageKind::none});
    for (size_t g = 0; g < groups.size(); ++g) {
      for (size_t r = 0; r < groups[g].rollouts.size(); ++r) {
        const Rollout& rollout = groups[g].rollouts[r];
        EXPECT_EQ(returns[g][r][0], rollout.reward);
        for (size_t k = 0; k + 1 < rollout.steps.size(); ++k) {
          // A few roundings of numbers below 10.
          EXPECT_NEAR(returns[g][r][k] - returns[g][r][k + 1], *rollout.credit[k].reward, 1e-13);
        }
      }
    }
    // Over the rollouts that have a turn, its baseline takes away what it adds.
    const auto centred = turn_advantages(groups, {.kind = AdvantageKind::group_mean});
    for (size_t g = 0; g < groups.size(); ++g) {
      for (size_t k = 0; k < 4; ++k) {
        double sum = 0.0;
        for (const std::vector<double>& rollout : centred[g])
          sum += k < rollout.size() ? rollout[k] : 0.0;
        EXPECT_NEAR(sum, 0.0, 1e-13);
      }
    }
  }
}

TEST(Credit, GivesEachSampledTokenItsStepsAdvantageOnce) {
  Rng rng(4);
  Group group;
  for (int r = 0; r < 2; ++r) group.rollouts.push_back(random_rollout(rng, 3));
  group.rollouts[0].reward = 1.0;
  Rollout& rollout = group.rollouts[0];
  rollout.credit.resize(3);
  rollout.credit[0].advantages = {0.25};
  rollout.credit[1].advantages.clear();  // the group's: 0.5
  for (size_t t = 0; t < rollout.steps[2].completion.size(); ++t) {
    rollout.credit[2].advantages.push_back(10.0 + static_cast<double>(t));
  }
  const PreparedBatch batch = prepare_batch(1, {group}, kIds, {});
  ASSERT_EQ(batch.first_sample, (std::vector<size_t>{0, 1, 2})) << "one sample each";
  const Sample& sample = batch.learner.samples[0];
  ASSERT_EQ(sample.advantages.size(), sample.ids.size());
  std::vector<float> trained, expected;
  for (size_t t = 0; t < sample.ids.size(); ++t) {
    if (sample.loss_mask[t] != 0) trained.push_back(sample.advantage(t));
    if (sample.step[t] < 0) {
      EXPECT_EQ(sample.advantage(t), 0.5f) << "the rollout's";
    }
  }
  expected.assign(rollout.steps[0].completion.size(), 0.25f);
  expected.insert(expected.end(), rollout.steps[1].completion.size(), 0.5f);
  for (size_t t = 0; t < rollout.steps[2].completion.size(); ++t) {
    expected.push_back(10.0f + static_cast<float>(t));
  }
  EXPECT_EQ(trained, expected);
  EXPECT_EQ(batch.learner.samples[1].advantages, std::vector<float>{-0.5f}) << "without credit";
}

TEST(Credit, OfBranchesGoesToTheSampleThatHasTheStep) {
  // Step 1 does not continue step 0: two samples, each with its own step's advantage.
  Rollout rollout;
  for (const int32_t first : {1, 5}) {
    TrajectoryStep& step = rollout.steps.emplace_back();
    step.prompt = {first, 2};
    step.completion = {7, 8};
    step.logprobs = {-1.0f, -1.0f};
    step.versions = {0, 0};
  }
  rollout.credit = {{.reward = {}, .advantages = {1.0, 2.0}},
                    {.reward = {}, .advantages = {3.0, 4.0}}};
  Group group;
  group.rollouts = {rollout};
  const PreparedBatch batch = prepare_batch(1, {group}, kIds, {.filter_zero_advantages = true});
  ASSERT_EQ(batch.learner.samples.size(), 2u) << "credit keeps a group whose own advantage is 0";
  EXPECT_EQ(batch.learner.samples[0].advantages, (std::vector<float>{0, 0, 1, 2}));
  EXPECT_EQ(batch.learner.samples[1].advantages, (std::vector<float>{0, 0, 3, 4}));
}

TEST(Credit, ThatDoesNotFitItsStepsIsAProblem) {
  Rng rng(5);
  const double nan = std::numeric_limits<double>::quiet_NaN();
  Rollout rollout = random_rollout(rng, 2);
  rollout.steps[1].completion = {1, 2, 3};
  EXPECT_EQ(credit_problem(rollout), "");
  rollout.credit.resize(1);
  EXPECT_EQ(credit_problem(rollout), "credit has 1 entries for 2 steps");
  rollout.credit.resize(2);
  EXPECT_EQ(credit_problem(rollout), "");
  rollout.credit[1].advantages = {1, 2};
  EXPECT_EQ(credit_problem(rollout),
            "step 1 has 2 advantages: it must have one, or one for each of its 3 tokens");
  rollout.credit[1].advantages = {1, 2, nan};
  EXPECT_NE(credit_problem(rollout).find("step 1 has the advantage nan"), std::string::npos);
  rollout.credit[1].advantages = {1, 2, 3};
  EXPECT_EQ(credit_problem(rollout), "");
  rollout.credit[0].reward = 1e39;
  EXPECT_NE(credit_problem(rollout).find("the reward of step 0 is 1e+39"), std::string::npos);
}

}  // namespace
}  // namespace leeway
