// Prompts of samples and losses that look past the mask: no preset trains on them.

#include <gtest/gtest.h>

#include "trainer/test_support.h"

namespace leeway {
namespace {

using testing::make_policy;
using testing::NamedPreset;
using testing::small_table;
using testing::spec_of;
using testing::TestFolder;
using testing::with;

// Single turns: a prompt, then sampled tokens up to the end.
std::vector<Sample> single_turns(const Parameters& policy, size_t count) {
  Rng rng(5);
  std::vector<Sample> samples(count);
  for (size_t i = 0; i < count; ++i) {
    Sample& sample = samples[i];
    const size_t prompt = 1 + i % 5, length = prompt + 2 + i % 4;
    for (size_t t = 0; t < length; ++t) {
      sample.ids.push_back(static_cast<int32_t>(rng.below(50)));
      sample.loss_mask.push_back(t >= prompt);
      sample.versions.push_back(t >= prompt ? 0 : -1);
    }
    sample.advantages = {i % 3 == 0 ? 1.0f : -0.5f};
    sample.rollout_id = static_cast<int32_t>(i);
  }
  // As if they had just been sampled: 0 where nothing was.
  Trainer scorer(policy, spec_of("reinforce"), small_table());
  const TokenValues rollout = scorer.forward(samples);
  for (size_t i = 0; i < count; ++i) samples[i].rollout = rollout[i];
  return samples;
}

double metric(const LossSpec& spec, const BatchResult& result, const std::string& name) {
  for (const auto& [key, value] :
       finalize_metrics(spec, result.passes.metrics, true, false, false)) {
    if (key == name) return value;
  }
  return std::nan("");
}

TEST(Prompts, ReachNoForeignPresetInItsFirstOnPolicyStep) {
  const Parameters policy = make_policy();
  const std::vector<Sample> samples = single_turns(policy, 11);
  const TestFolder teacher;
  save_parameters(make_policy(9), teacher.path());
  for (const NamedPreset& named : testing::foreign_list(Catalog())) {
    const LossSpec spec = spec_of(named);
    TrainerTable table = small_table();
    if (spec.reads(Stream::teacher)) table.teacher = teacher.path();
    Trainer trainer(policy, spec, table);
    const BatchResult result = trainer.train_batch(samples);
    ASSERT_EQ(result.failure, "") << named.label();
    EXPECT_EQ(metric(spec, result, "mismatch_kl"), 0.0) << named.label();
    EXPECT_EQ(metric(spec, result, "ratio_max"), 1.0) << named.label();
    EXPECT_EQ(metric(spec, result, "tokens"), static_cast<double>(result.passes.trained_tokens))
        << named.label();
    if (!spec.corrections.empty()) {
      EXPECT_NEAR(metric(spec, result, "weight_mean"), 1.0, 1e-6) << named.label();
    }
  }
}

TEST(Prompts, WhatLiesBetweenTurnsStaysInTheLossesThatLookPastTheMask) {
  const Parameters policy = make_policy();
  std::vector<Sample> samples = single_turns(policy, 4);
  double between = 0.0;
  for (Sample& sample : samples) {
    const size_t n = sample.ids.size();
    sample.loss_mask[n - 2] = 0;  // as a tool's answer
    between +=
        std::find(sample.loss_mask.begin(), sample.loss_mask.end(), 1) < sample.loss_mask.end() - 2;
  }
  const LossSpec spec = spec_of("cookbook_PR169/dapo");
  Trainer trainer(policy, spec, small_table());
  const BatchResult result = trainer.train_batch(samples);
  ASSERT_EQ(result.failure, "");
  ASSERT_GT(between, 0.0);
  EXPECT_EQ(metric(spec, result, "tokens"),
            static_cast<double>(result.passes.trained_tokens) + between);
}

TEST(Trainer, GivesBackTheStreamsThatTheLossRead) {
  const Parameters policy = make_policy();
  const std::vector<Sample> samples = single_turns(policy, 5);
  TrainerTable table = small_table();
  Trainer one_step(policy, spec_of(with("grpo+tis", {{"ref_kl", 0.1}})), table);
  const BatchResult first = one_step.train_batch(samples);
  EXPECT_TRUE(first.streams.prox_is_pi);
  EXPECT_TRUE(first.streams.teacher.empty());
  ASSERT_EQ(first.streams.ref.size(), samples.size());
  EXPECT_EQ(first.streams.ref, first.passes.logprobs);  // the reference is the policy at step 0
  table.epochs = 2;
  Trainer two_steps(policy, spec_of("ppo"), table);
  const BatchResult second = two_steps.train_batch(samples);
  EXPECT_FALSE(second.streams.prox_is_pi);
  EXPECT_EQ(second.streams.prox, first.passes.logprobs);
  EXPECT_TRUE(second.streams.ref.empty());
}

}  // namespace
}  // namespace leeway
