// The whole flow of a batch equals its parts, called in order.

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
using testing::TestFolder;
using testing::with;

// The flow by hand, from primitives.
void train_by_hand(Trainer& trainer, const TrainerTable& table, std::span<const Sample> samples) {
  PolicyStreams streams;
  if (trainer.spec().reads(Stream::ref)) streams.ref = trainer.ref_forward(samples);
  if (trainer.spec().reads(Stream::teacher)) streams.teacher = trainer.teacher_forward(samples);
  if (trainer.spec().reads(Stream::prox)) streams.prox = trainer.forward(samples);
  const bool step_each = table.optimizer_steps == OptimizerSteps::minibatch;
  for (int64_t epoch = 0; epoch < table.epochs; ++epoch) {
    const auto seed = static_cast<uint64_t>(trainer.optimizer_steps() + epoch);
    for (const auto& numbers : split_minibatches(samples, table.minibatches, seed)) {
      const std::vector<Sample> part = testing::some(samples, numbers);
      std::optional<double> denominator;
      if (!step_each) denominator = trainer.denominator_of_samples(samples);
      trainer.forward_backward(part, testing::some(streams, numbers), denominator);
      if (step_each) trainer.optim_step();
    }
    if (!step_each) trainer.optim_step();
  }
}

TEST(TrainBatch, IsItsPrimitivesBitForBit) {
  const Parameters policy = make_policy();
  const TestFolder folder;
  save_parameters(make_policy(77), folder.path());
  for (const auto& named :
       {with("grpo+tis", {{"ref_kl", 0.1}}), with("icepop", {{"teacher_tau", 0.2}}),
        with("gspo", {{"reduction", std::string("seq_mean_token_mean")}})}) {
    for (const auto& [epochs, minibatches, steps] :
         std::vector<std::tuple<int64_t, int64_t, OptimizerSteps>>{
             {1, 1, OptimizerSteps::batch},
             {2, 3, OptimizerSteps::batch},
             {2, 3, OptimizerSteps::minibatch},
             {3, 1, OptimizerSteps::minibatch}}) {
      TrainerTable table = small_table();
      table.epochs = epochs, table.minibatches = minibatches, table.optimizer_steps = steps;
      table.teacher = folder.path();
      const LossSpec spec = spec_of(named);
      Trainer whole(policy, spec, table), parts(policy, spec, table);
      for (uint64_t batch = 0; batch < 2; ++batch) {
        const std::vector<Sample> samples = rolled_out(policy, 40 + batch, 14);
        const BatchResult result = whole.train_batch(samples);
        EXPECT_EQ(result.failure, "");
        EXPECT_EQ(result.optimizer_steps, optimizer_steps_per_batch(table));
        EXPECT_GE(result.largest_grad_norm, result.grad_norm);
        train_by_hand(parts, table, samples);
      }
      EXPECT_TRUE(same_bits(whole.parameters(), parts.parameters()))
          << named.label() << " " << epochs << " " << minibatches << " " << name_of(steps);
      EXPECT_FALSE(same_bits(whole.parameters(), policy));
      EXPECT_EQ(whole.optimizer_steps(), parts.optimizer_steps());
    }
  }
}

TEST(TrainBatch, SplitForOneStepIsTheUnsplitStepUpToRounding) {
  const Parameters policy = make_policy();
  const std::vector<Sample> samples = rolled_out(policy, 4, 20);
  for (const auto& named :
       {with("grpo+tis"), with("m2po"), with("icepop", {{"denominator", std::string("kept")}})}) {
    TrainerTable table = testing::gradient_table();
    table.entropy_bonus = 0.1;
    std::vector<double> norms, losses;
    for (const int64_t minibatches : {1, 4}) {
      table.minibatches = minibatches;
      Trainer trainer(policy, spec_of(named), table);
      const BatchResult result = trainer.train_batch(samples);
      EXPECT_EQ(result.optimizer_steps, 1);
      norms.push_back(result.grad_norm);
      losses.push_back(result.loss);
    }
    EXPECT_NEAR(norms[0], norms[1], 1e-5 * norms[0]) << named.label();
    EXPECT_NEAR(losses[0], losses[1], 1e-5 * (1.0 + std::abs(losses[0]))) << named.label();
  }
}

TEST(TrainBatch, ReportsTheLogprobsOfEverySampleBeforeTheStep) {
  const Parameters policy = make_policy();
  const std::vector<Sample> samples = rolled_out(policy, 4, 20);
  for (const OptimizerSteps steps : {OptimizerSteps::batch, OptimizerSteps::minibatch}) {
    TrainerTable table = small_table();
    table.epochs = 2, table.minibatches = 4, table.optimizer_steps = steps;
    Trainer trainer(policy, spec_of("icepop"), table);
    const TokenValues before = trainer.forward(samples);
    const TokenValues logprobs = trainer.train_batch(samples).passes.logprobs;
    ASSERT_EQ(logprobs.size(), samples.size());
    double far = 0.0;
    for (size_t i = 0; i < samples.size(); ++i) {
      ASSERT_EQ(logprobs[i].size(), samples[i].ids.size());
      for (size_t t = 0; t < logprobs[i].size(); ++t) {
        if (samples[i].loss_mask[t] == 0) {
          EXPECT_EQ(logprobs[i][t], 0.0f);
        } else {
          EXPECT_LT(logprobs[i][t], 0.0f);
        }
        far = std::max(far, std::abs(double{logprobs[i][t]} - double{before[i][t]}));
      }
    }
    // With a step after each part, later parts are scored by the policy as it then is.
    EXPECT_EQ(far == 0.0, steps == OptimizerSteps::batch);
  }
}

TEST(TrainBatch, TakesNoStepForAPartWithoutTrainedTokens) {
  const Parameters policy = make_policy();
  std::vector<Sample> samples = rolled_out(policy, 4, 2);
  for (Sample& sample : samples) sample.rollout_id = -1;
  std::fill(samples[0].loss_mask.begin(), samples[0].loss_mask.end(), 0);
  TrainerTable table = small_table();
  table.minibatches = 2, table.optimizer_steps = OptimizerSteps::minibatch;
  table.optimizer.weight_decay = 0.1;
  Trainer both(policy, spec_of("icepop"), table), one(policy, spec_of("icepop"), table);
  EXPECT_EQ(both.train_batch(samples).optimizer_steps, 1);
  one.train_batch(std::span(samples).subspan(1));
  EXPECT_TRUE(same_bits(both.parameters(), one.parameters()));
}

TEST(ProxForward, OfOneStepIsThePassItselfBitForBit) {
  const Parameters policy = make_policy();
  for (const auto& named : {with("grpo+tis"), with("gspo"), with("m2po")}) {
    std::vector<Parameters> results;
    for (const ProxForward prox : {ProxForward::automatic, ProxForward::always}) {
      TrainerTable table = small_table();
      table.prox_forward = prox;
      Trainer trainer(policy, spec_of(named), table);
      for (uint64_t batch = 0; batch < 2; ++batch) {
        const BatchResult result = trainer.train_batch(rolled_out(policy, batch, 12));
        EXPECT_EQ(result.prox_seconds > 0.0, prox == ProxForward::always);
      }
      results.push_back(trainer.parameters());
    }
    EXPECT_TRUE(same_bits(results[0], results[1])) << named.label();
  }
}

TEST(ProxForward, OfSeveralStepsIsComputedUnlessNever) {
  const Parameters policy = make_policy();
  const std::vector<Sample> samples = rolled_out(policy, 1, 12);
  TrainerTable table = small_table();
  table.epochs = 2;
  const auto train = [&](ProxForward prox, const char* preset) {
    table.prox_forward = prox;
    Trainer trainer(policy, spec_of(preset), table);
    const BatchResult result = trainer.train_batch(samples);
    EXPECT_EQ(result.prox_seconds > 0.0,
              prox != ProxForward::never && trainer.spec().reads(Stream::prox));
    return trainer.parameters();
  };
  EXPECT_TRUE(
      same_bits(train(ProxForward::automatic, "grpo+tis"), train(ProxForward::always, "grpo+tis")));
  EXPECT_FALSE(
      same_bits(train(ProxForward::automatic, "grpo+tis"), train(ProxForward::never, "grpo+tis")));
  EXPECT_TRUE(same_bits(train(ProxForward::automatic, "icepop"),
                        train(ProxForward::never, "icepop")));  // reads no prox
}

TEST(ProxForward, NeverTakesTheRollout) {
  const Parameters policy = make_policy();
  const std::vector<Sample> samples = rolled_out(policy, 1, 12);
  TrainerTable table = small_table();
  table.prox_forward = ProxForward::never;
  Trainer whole(policy, spec_of("grpo"), table), parts(policy, spec_of("grpo"), table);
  whole.train_batch(samples);
  PolicyStreams streams;
  for (const Sample& sample : samples) streams.prox.push_back(sample.rollout);
  parts.forward_backward(samples, streams);
  parts.optim_step();
  EXPECT_TRUE(same_bits(whole.parameters(), parts.parameters()));
}

TEST(ProxForward, NeverIsRefusedWithoutRollouts) {
  const Parameters policy = make_policy();
  std::vector<Sample> samples = rolled_out(policy, 1, 6);
  for (Sample& sample : samples) sample.rollout.clear();
  TrainerTable table = small_table();
  table.prox_forward = ProxForward::never;
  Trainer trainer(policy, spec_of("grpo"), table);
  testing::expect_refused([&] { trainer.train_batch(samples); }, {"rollout", "prox"});
  EXPECT_TRUE(same_bits(trainer.parameters(), policy));
}

// Which tokens the reference keeps, all samples in one pass.
TokenFlags reference_kept(const LossSpec& spec, std::span<const Sample> samples,
                          const TokenValues& pi, const TokenValues& prox) {
  Batch batch;
  for (size_t i = 0; i < samples.size(); ++i) {
    for (size_t t = 0; t < samples[i].ids.size(); ++t) {
      batch.pi.push_back(pi[i][t]);
      batch.prox.push_back(prox[i][t]);
      batch.rollout.push_back(samples[i].rollout[t]);
      batch.advantages.push_back(samples[i].advantage(t));
      batch.mask.push_back(samples[i].loss_mask[t]);
    }
    batch.offsets.push_back(static_cast<int64_t>(batch.pi.size()));
  }
  const LossResult result = evaluate_reference(spec, batch.view(), {}, nullptr, true);
  TokenFlags kept(samples.size());
  size_t token = 0;
  for (size_t i = 0; i < samples.size(); ++i) {
    for (size_t t = 0; t < samples[i].ids.size(); ++t, ++token) {
      kept[i].push_back(samples[i].loss_mask[t] != 0 && result.trace[token].kept ? 1 : 0);
    }
  }
  return kept;
}

TEST(Kept, LooksAtTheRolloutsWhereTheyStandForProx) {
  const Parameters policy = make_policy();
  const std::vector<Sample> samples = rolled_out(policy, 3, 24);  // by an older policy
  TrainerTable table = small_table();
  table.prox_forward = ProxForward::never;
  Trainer trainer(policy, spec_of("grpo"), table);
  const BatchResult result = trainer.train_batch(samples);
  ASSERT_EQ(result.failure, "");
  const TokenValues& pi = result.passes.logprobs;
  TokenValues rollouts;
  for (const Sample& sample : samples) rollouts.push_back(sample.rollout);
  EXPECT_EQ(result.passes.kept, reference_kept(trainer.spec(), samples, pi, rollouts));
  EXPECT_NE(result.passes.kept, reference_kept(trainer.spec(), samples, pi, pi));
}

TEST(Kept, IsDecidedInTheMinibatchThatWasTrained) {
  const Parameters policy = make_policy();
  const std::vector<Sample> samples = rolled_out(policy, 3, 24);
  for (const OptimizerSteps steps : {OptimizerSteps::minibatch, OptimizerSteps::batch}) {
    TrainerTable table = small_table();
    table.minibatches = 3;
    table.optimizer_steps = steps;
    // Its mask depends on all tokens that are looked at together.
    Trainer trainer(policy, spec_of("m2po"), table);
    const BatchResult result = trainer.train_batch(samples);
    ASSERT_EQ(result.failure, "");
    const bool step_each = steps == OptimizerSteps::minibatch;
    const TokenValues& pi = result.passes.logprobs;
    const TokenValues& prox = step_each ? result.streams.prox : pi;
    TokenFlags expected(samples.size());
    for (const auto& numbers : split_minibatches(samples, step_each ? 3 : 1, 0)) {
      PolicyStreams streams{.prox = prox, .ref = pi};
      streams = testing::some(streams, numbers);
      TokenFlags part = reference_kept(trainer.spec(), testing::some(samples, numbers), streams.ref,
                                       streams.prox);
      for (size_t i = 0; i < numbers.size(); ++i) expected[numbers[i]] = std::move(part[i]);
    }
    EXPECT_EQ(result.passes.kept, expected);
    const bool as_one = result.passes.kept == reference_kept(trainer.spec(), samples, pi, prox);
    EXPECT_EQ(as_one, !step_each);
  }
}

TEST(Kept, IsThatOfTheFirstEpoch) {
  const Parameters policy = make_policy();
  const std::vector<Sample> samples = rolled_out(policy, 3, 12);
  TrainerTable table = small_table();
  Trainer once(policy, spec_of("grpo+tis"), table);
  table.epochs = 3;
  Trainer thrice(policy, spec_of("grpo+tis"), table);
  EXPECT_EQ(once.train_batch(samples).passes.kept, thrice.train_batch(samples).passes.kept);
}

TEST(Reference, IsThePolicyAtStepZeroWhileThePolicyMoves) {
  const Parameters policy = make_policy();
  const std::vector<Sample> samples = rolled_out(policy, 9, 10);
  Trainer trainer(policy, spec_of(with("grpo", {{"ref_kl", 0.2}})), small_table());
  const TokenValues before = trainer.ref_forward(samples);
  EXPECT_EQ(before, trainer.forward(samples));
  trainer.train_batch(samples);
  trainer.train_batch(samples);
  EXPECT_EQ(trainer.ref_forward(samples), before);
  EXPECT_NE(trainer.forward(samples), before);
}

TEST(OtherPolicies, AreLoadedFromTheirFolders) {
  const Parameters policy = make_policy();
  const Parameters other = make_policy(55);
  const TestFolder folder;
  save_parameters(other, folder.path());
  TrainerTable table = small_table();
  table.reference = table.teacher = folder.path();
  Trainer trainer(policy, spec_of(with("grpo", {{"ref_kl", 0.2}, {"teacher_tau", 0.1}})), table);
  Trainer of_other(other, spec_of("reinforce"), small_table());
  const std::vector<Sample> samples = rolled_out(policy, 9, 10);
  EXPECT_EQ(trainer.ref_forward(samples), of_other.forward(samples));
  EXPECT_EQ(trainer.teacher_forward(samples), of_other.forward(samples));
}

TEST(OtherPolicies, AreRefusedIfTheyDoNotFit) {
  ModelConfig config = testing::small_config(Family::llama);
  config.vocab_size = 60;
  const TestFolder folder;
  save_parameters(testing::small_parameters(config), folder.path());
  TrainerTable table = small_table();
  table.teacher = folder.path();
  const LossSpec spec = spec_of(with("icepop", {{"teacher_tau", 0.1}}));
  testing::expect_refused([&] { Trainer trainer(make_policy(), spec, table); },
                          {"trainer.teacher", folder.path(), "60", "50"});
  table.teacher = folder.at("missing");
  testing::expect_refused([&] { Trainer trainer(make_policy(), spec, table); }, {"missing"});
}

TEST(TrainBatch, MovesThePolicyTowardsWhatIsRewarded) {
  const Parameters policy = make_policy();
  std::vector<Sample> samples = testing::make_samples(6, 6, true);
  for (size_t i = 0; i < samples.size(); ++i) samples[i].advantages = {i % 2 == 0 ? 1.0f : -1.0f};
  Trainer trainer(policy, spec_of("reinforce"), small_table());
  const TokenValues before = trainer.forward(samples);
  for (int step = 0; step < 5; ++step) trainer.train_batch(samples);
  const TokenValues after = trainer.forward(samples);
  for (size_t i = 0; i < samples.size(); ++i) {
    double change = 0.0;
    for (size_t t = 0; t < before[i].size(); ++t) change += after[i][t] - before[i][t];
    EXPECT_GT(i % 2 == 0 ? change : -change, 0.0) << i;
  }
}

TEST(OptimizerSteps, OfABatch) {
  TrainerTable table;
  EXPECT_EQ(optimizer_steps_per_batch(table), 1);
  table.epochs = 3, table.minibatches = 4;
  EXPECT_EQ(optimizer_steps_per_batch(table), 3);
  table.optimizer_steps = OptimizerSteps::minibatch;
  EXPECT_EQ(optimizer_steps_per_batch(table), 12);
}

}  // namespace
}  // namespace leeway
