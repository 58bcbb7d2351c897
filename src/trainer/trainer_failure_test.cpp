// Numbers that are not finite change no weight.

#include <gtest/gtest.h>

#include "trainer/minibatches.h"
#include "trainer/test_support.h"

namespace leeway {
namespace {

using testing::make_policy;
using testing::rolled_out;
using testing::same_bits;
using testing::small_table;
using testing::spec_of;

// What a trainer that never saw the bad batch has after these.
Parameters after_good_batches(const Parameters& policy, const std::string& preset,
                              const TrainerTable& table, int count) {
  Trainer trainer(policy, spec_of(preset), table);
  for (int i = 0; i < count; ++i) {
    EXPECT_EQ(trainer.train_batch(rolled_out(policy, static_cast<uint64_t>(i), 8)).failure, "");
  }
  return trainer.parameters();
}

// A ratio that overflows float.
std::vector<Sample> overflowing(const Parameters& policy, size_t sample = 4) {
  std::vector<Sample> samples = rolled_out(policy, 50, 8);
  for (size_t t = 0; t < samples[sample].ids.size(); ++t) {
    if (samples[sample].loss_mask[t] != 0) samples[sample].rollout[t] = -300.0f;
  }
  samples[sample].advantages = {1.0f};
  return samples;
}

TEST(AFailedBatch, LeavesTheTrainerAsItWas) {
  const Parameters policy = make_policy();
  for (const int64_t max_tokens : {1, 1000}) {
    for (const double entropy_bonus : {0.0, 0.1}) {
      TrainerTable table = small_table();
      table.max_tokens = max_tokens, table.entropy_bonus = entropy_bonus;
      Trainer trainer(policy, spec_of("is"), table);
      trainer.train_batch(rolled_out(policy, 0, 8));
      const Parameters before = trainer.parameters();
      const BatchResult bad = trainer.train_batch(overflowing(policy));
      EXPECT_NE(bad.failure, "");
      EXPECT_EQ(bad.optimizer_steps, 0);
      EXPECT_TRUE(same_bits(trainer.parameters(), before));
      EXPECT_EQ(trainer.optimizer_steps(), 1);
      trainer.train_batch(rolled_out(policy, 1, 8));
      EXPECT_TRUE(same_bits(trainer.parameters(), after_good_batches(policy, "is", table, 2)));
    }
  }
}

TEST(AFailedBatch, OfALossAcrossTheBatchLeavesTheTrainerAsItWas) {
  const Parameters policy = make_policy();
  TrainerTable table = small_table();
  table.max_tokens = 1;
  const LossSpec normalised = spec_of(
      testing::with("verl/vanilla+IS", {{"level", std::string("token")}, {"batch_norm", true}}));
  Trainer trainer(policy, normalised, table), control(policy, normalised, table);
  std::vector<Sample> bad = rolled_out(policy, 2, 8);
  bad[0].advantages = {3e38f};
  EXPECT_NE(trainer.train_batch(bad).failure, "");
  EXPECT_TRUE(same_bits(trainer.parameters(), policy));
  trainer.train_batch(rolled_out(policy, 1, 8));
  control.train_batch(rolled_out(policy, 1, 8));
  EXPECT_TRUE(same_bits(trainer.parameters(), control.parameters()));
}

TEST(AFailedPass, IsNotSteppedOn) {
  const Parameters policy = make_policy();
  TrainerTable table = small_table();
  table.max_tokens = 1;  // micro-batches before the bad one have left their gradients
  Trainer trainer(policy, spec_of("is"), table);
  const PassResult pass = trainer.forward_backward(overflowing(policy), {});
  EXPECT_NE(pass.failure, "");
  const OptimResult step = trainer.optim_step();
  EXPECT_EQ(step.failure, pass.failure);
  EXPECT_TRUE(same_bits(trainer.parameters(), policy));
  EXPECT_EQ(trainer.optimizer_steps(), 0);
  trainer.train_batch(rolled_out(policy, 0, 8));
  EXPECT_TRUE(same_bits(trainer.parameters(), after_good_batches(policy, "is", table, 1)));
}

TEST(AFailedPass, IsForgottenAfterTheStepThatReportsIt) {
  const Parameters policy = make_policy();
  TrainerTable table = small_table();
  table.max_tokens = 1;
  Trainer trainer(policy, spec_of("is"), table);
  EXPECT_NE(trainer.forward_backward(overflowing(policy), {}).failure, "");
  EXPECT_NE(trainer.optim_step().failure, "");
  EXPECT_EQ(trainer.optim_step().grad_norm, 0.0);
}

TEST(WeightsThatAreNotFinite, AreReportedAndLeftAlone) {
  for (const float bad : {testing::kNan, HUGE_VALF}) {
    for (const char* preset : {"reinforce", "icepop", "grpo+tis", "m2po"}) {
      const Parameters good = make_policy();
      Parameters policy = good;
      policy.of(1)[5] = bad;
      TrainerTable table = small_table();
      Trainer trainer(policy, spec_of(preset), table);
      const BatchResult result = trainer.train_batch(rolled_out(good, 3, 9));
      EXPECT_NE(result.failure, "") << preset;
      EXPECT_EQ(result.optimizer_steps, 0);
      EXPECT_TRUE(same_bits(trainer.parameters(), policy)) << preset;
    }
  }
}

TEST(AFailedStep, LeavesTheWeightsOfTheOneBefore) {
  const Parameters policy = make_policy();
  TrainerTable table = small_table();
  table.minibatches = 2, table.optimizer_steps = OptimizerSteps::minibatch;
  std::vector<Sample> samples = rolled_out(policy, 12, 8);
  for (Sample& sample : samples) sample.rollout_id = -1;
  const auto parts = split_minibatches(samples, 2, 0);
  Sample& bad = samples[parts[1][0] == 5 ? parts[1][1] : parts[1][0]];  // 5 has nothing trained
  bad.advantages = {1.0f};
  for (size_t t = 0; t < bad.ids.size(); ++t) {
    if (bad.loss_mask[t] != 0) bad.rollout[t] = -300.0f;
  }
  Trainer trainer(policy, spec_of("is"), table), control(policy, spec_of("is"), table);
  const BatchResult result = trainer.train_batch(samples);
  EXPECT_NE(result.failure, "");
  EXPECT_EQ(result.optimizer_steps, 1);
  control.forward_backward(testing::some(samples, parts[0]), {});
  control.optim_step();
  EXPECT_TRUE(same_bits(trainer.parameters(), control.parameters()));
}

// The gradient's norm is finite in double, but its square overflows float32: the second moment
// would stay infinite for good.
TEST(AFailedStep, IsOneWhoseSquaresOverflow) {
  const Parameters policy = make_policy();
  std::vector<Sample> samples = rolled_out(policy, 12, 8);
  for (Sample& sample : samples) sample.advantages = {1e24f};
  for (const double max_grad_norm : {0.0, 1.0}) {
    TrainerTable table = small_table();
    table.optimizer.max_grad_norm = max_grad_norm;
    Trainer trainer(policy, spec_of("reinforce"), table);
    const BatchResult result = trainer.train_batch(samples);
    // After clipping, the same gradient is fine.
    EXPECT_EQ(result.failure.empty(), max_grad_norm > 0.0);
    EXPECT_EQ(same_bits(trainer.parameters(), policy), max_grad_norm == 0.0);
    EXPECT_EQ(trainer.optimizer_steps(), max_grad_norm > 0.0 ? 1 : 0);
  }
}

}  // namespace
}  // namespace leeway
