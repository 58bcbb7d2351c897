// One pass: its loss and gradient, and what they must not depend on.

#include <gtest/gtest.h>

#include "trainer/loss_cases.h"
#include "trainer/test_support.h"

namespace leeway {
namespace {

using testing::around;
using testing::gradient_table;
using testing::loss_cases;
using testing::LossCase;
using testing::make_policy;
using testing::make_samples;
using testing::NamedPreset;
using testing::same_bits;
using testing::slow_pass;
using testing::SlowPass;
using testing::spec_of;
using testing::take_gradient;
using testing::with;

struct GivenBatch {
  std::vector<Sample> samples;
  PolicyStreams streams;
};

// A batch that this spec can be trained on.
GivenBatch batch_for(const LossCase& loss, Trainer& trainer, uint64_t seed) {
  GivenBatch batch;
  batch.samples = make_samples(seed, 17, loss.clean);
  const TokenValues pi = trainer.forward(batch.samples);
  const auto stream = [&](uint64_t stream_seed, double spread) {
    return around(pi, batch.samples, stream_seed, spread, loss.clean);
  };
  const TokenValues rollout = stream(seed + 1, 0.3);
  for (size_t i = 0; i < batch.samples.size(); ++i) batch.samples[i].rollout = rollout[i];
  const LossSpec& spec = trainer.spec();
  if (spec.reads(Stream::prox)) batch.streams.prox = stream(seed + 2, 0.2);
  if (spec.reads(Stream::ref)) batch.streams.ref = stream(seed + 3, 0.4);
  if (spec.reads(Stream::teacher)) batch.streams.teacher = stream(seed + 4, 0.4);
  return batch;
}

TrainerTable table_for(const testing::TestFolder& folder, const Parameters& policy,
                       const LossSpec& spec, int64_t max_tokens) {
  TrainerTable table = gradient_table(max_tokens);
  if (spec.reads(Stream::teacher)) {
    save_parameters(policy, folder.path());
    table.teacher = folder.path();
  }
  return table;
}

TEST(ForwardBackward, AgreesWithTheSlowPathHoweverTheBatchIsCut) {
  const Parameters policy = make_policy();
  const testing::TestFolder folder;
  for (const LossCase& loss : loss_cases()) {
    const LossSpec spec = spec_of(loss.preset);
    for (const auto& [max_tokens, slots] : std::vector<std::pair<int64_t, int64_t>>{
             {1, 1}, {40, 1}, {100000, 1}, {40, 4}, {100000, 4}, {100000, 32}}) {
      const std::string where = fmt::format("{} in micro-batches of {}, {} slots",
                                            loss.preset.label(), max_tokens, slots);
      TrainerTable table = table_for(folder, policy, spec, max_tokens);
      table.gradient_slots = slots;
      Trainer trainer(policy, spec, table);
      const GivenBatch batch = batch_for(loss, trainer, 21);
      const SlowPass slow = slow_pass(policy, spec, batch.samples, batch.streams);
      const PassResult pass = trainer.forward_backward(batch.samples, batch.streams);
      ASSERT_EQ(pass.failure, "") << where;
      ASSERT_EQ(pass.micro_batches == 1, max_tokens == 100000 && slots == 1) << where;
      EXPECT_NEAR(pass.loss, slow.loss, 1e-5 * (1.0 + std::abs(slow.loss))) << where;
      EXPECT_NEAR(pass.entropy, slow.entropy, 1e-5 * slow.entropy) << where;
      for (Slot slot : {Slot::tokens, Slot::positive_tokens, Slot::negative_tokens, Slot::dropped,
                        Slot::kept, Slot::sequences, Slot::clip_binding, Slot::version_max}) {
        EXPECT_EQ(pass.metrics[slot], slow.metrics[slot]) << where;
      }
      EXPECT_EQ(pass.metrics.histogram(), slow.metrics.histogram()) << where;
      for (size_t i = 0; i < batch.samples.size(); ++i) {
        for (size_t t = 0; t < batch.samples[i].ids.size(); ++t) {
          if (batch.samples[i].loss_mask[t] == 0) continue;
          ASSERT_EQ(pass.logprobs[i][t], slow.logprobs[i][t]) << where;
        }
      }
      testing::expect_near(take_gradient(trainer), slow.gradient, 3e-5, where);
    }
  }
}

TEST(ForwardBackward, GivesTheSameBitsForAnyThreads) {
  const Parameters policy = make_policy(2, true);
  for (const LossCase& loss : loss_cases()) {
    const LossSpec spec = spec_of(loss.preset);
    if (spec.reads(Stream::teacher)) continue;
    std::vector<Parameters> gradients;
    std::vector<double> losses;
    for (int64_t threads = 1; threads <= 3; ++threads) {
      TrainerTable table = gradient_table();
      table.threads = threads;
      Trainer trainer(policy, spec, table);
      const GivenBatch batch = batch_for(loss, trainer, 5);
      losses.push_back(trainer.forward_backward(batch.samples, batch.streams).loss);
      gradients.push_back(take_gradient(trainer));
    }
    EXPECT_EQ(losses[0], losses[1]) << loss.preset.label();
    EXPECT_EQ(losses[0], losses[2]) << loss.preset.label();
    EXPECT_TRUE(same_bits(gradients[0], gradients[1])) << loss.preset.label();
    EXPECT_TRUE(same_bits(gradients[0], gradients[2])) << loss.preset.label();
  }
}

TEST(ForwardBackward, KeptAndRecomputedActivationsGiveTheSameBits) {
  const Parameters policy = make_policy();
  const LossCase loss{with("dapo")};
  std::vector<Parameters> gradients;
  for (const Recompute recompute : {Recompute::off, Recompute::selective, Recompute::layer}) {
    TrainerTable table = gradient_table();
    table.recompute_activations = recompute;
    Trainer trainer(policy, spec_of(loss.preset), table);
    const GivenBatch batch = batch_for(loss, trainer, 8);
    trainer.forward_backward(batch.samples, batch.streams);
    gradients.push_back(take_gradient(trainer));
  }
  EXPECT_TRUE(same_bits(gradients[0], gradients[1]));
  EXPECT_TRUE(same_bits(gradients[0], gradients[2]));
}

TEST(ForwardBackward, OfPartsWithTheWholeDenominatorAddsUp) {
  const Parameters policy = make_policy();
  for (const char* reduction : {"token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "sum"}) {
    const LossCase loss{with("grpo+tis", {{"reduction", std::string(reduction)}})};
    Trainer trainer(policy, spec_of(loss.preset), gradient_table());
    const GivenBatch batch = batch_for(loss, trainer, 3);
    const PassResult whole = trainer.forward_backward(batch.samples, batch.streams);
    const Parameters expected = take_gradient(trainer);
    // Samples of a rollout stay together: they share every second sample of four.
    std::vector<size_t> first, second;
    for (size_t i = 0; i < batch.samples.size(); ++i) (i % 8 < 4 ? first : second).push_back(i);
    const double denominator = trainer.denominator_of_samples(batch.samples);
    PassResult parts;
    for (const auto& numbers : {first, second}) {
      parts.merge(trainer.forward_backward(testing::some(batch.samples, numbers),
                                           testing::some(batch.streams, numbers), denominator));
    }
    EXPECT_NEAR(parts.loss, whole.loss, 1e-5 * (1.0 + std::abs(whole.loss))) << reduction;
    EXPECT_EQ(parts.tokens, whole.tokens);
    EXPECT_EQ(parts.trained_tokens, whole.trained_tokens);
    EXPECT_EQ(parts.metrics[Slot::kept], whole.metrics[Slot::kept]);
    testing::expect_near(take_gradient(trainer), expected, 3e-5, reduction);
  }
}

// The loss changes along a direction as the gradient predicts.
TEST(ForwardBackward, IsTheDerivativeOfItsLoss) {
  const Parameters policy = make_policy(4);
  struct Case {
    NamedPreset preset;
    double entropy_bonus;
  };
  for (const Case& c :
       {Case{with("reinforce"), 0.0}, Case{with("reinforce"), 0.7}, Case{with("is"), 0.0},
        Case{with("is"), -0.4},
        Case{with("gspo",
                  {{"gradient", std::string("through_mean")}, {"eps_low", 0.9}, {"eps_high", 9.0}}),
             0.1},
        Case{with("grpo", {{"ref_kl", 0.5}, {"eps_low", 1.0}, {"eps_high", 9.0}}), 0.0}}) {
    const std::string where = fmt::format("{} entropy {}", c.preset.label(), c.entropy_bonus);
    TrainerTable table = gradient_table();
    table.entropy_bonus = c.entropy_bonus;
    const LossSpec spec = spec_of(c.preset);
    Trainer trainer(policy, spec, table);
    const GivenBatch batch = batch_for({c.preset}, trainer, 31);
    const SlowPass slow = slow_pass(policy, spec, batch.samples, batch.streams, c.entropy_bonus);
    const PassResult pass = trainer.forward_backward(batch.samples, batch.streams);
    EXPECT_NEAR(pass.loss, slow.loss, 1e-5 * (1.0 + std::abs(slow.loss))) << where;
    const Parameters gradient = take_gradient(trainer);
    testing::expect_near(gradient, slow.gradient, 3e-5, where);

    // Half the gradient's own direction, so that there is an effect, half a random one.
    Parameters direction = gradient;
    Rng rng(9);
    const double norm = std::sqrt(testing::dot(gradient, gradient));
    const double root = std::sqrt(static_cast<double>(policy.count()));
    for (size_t i = 0; i < direction.table().size(); ++i) {
      for (float& value : direction.of(i)) {
        value = static_cast<float>(value / norm + rng.normal() / root);
      }
    }
    constexpr double kStep = 4e-3;
    const auto loss_at = [&](double way) {
      return slow_pass(testing::moved(policy, direction, way), spec, batch.samples, batch.streams,
                       c.entropy_bonus)
          .loss;
    };
    const double difference = (loss_at(kStep) - loss_at(-kStep)) / (2.0 * kStep);
    const double expected = testing::dot(gradient, direction);
    EXPECT_NEAR(difference, expected, 2e-3 * std::abs(expected) + 1e-4) << where;
  }
}

TEST(ForwardBackward, ComputesNothingAfterTheLastTrainedToken) {
  const Parameters policy = make_policy();
  Sample sample;
  sample.ids = {1, 2, 3, 4, 5, 6, 7, 8};
  sample.loss_mask = {0, 0, 0, 1, 0, 1, 0, 0};
  sample.advantages = {1.0f};
  Sample longer = sample;
  longer.ids.resize(100, 9);
  longer.loss_mask.resize(100, 0);
  std::vector<Parameters> gradients;
  for (const Sample& one : {sample, longer}) {
    Trainer trainer(policy, spec_of("reinforce"), gradient_table());
    const PassResult pass = trainer.forward_backward({&one, 1}, {});
    EXPECT_EQ(pass.tokens, 5);
    EXPECT_EQ(pass.trained_tokens, 2);
    EXPECT_EQ(pass.largest_micro_batch, 5);
    EXPECT_EQ(pass.logprobs[0].size(), one.ids.size());
    EXPECT_EQ(pass.logprobs[0][4], 0.0f);
    gradients.push_back(take_gradient(trainer));
  }
  EXPECT_TRUE(same_bits(gradients[0], gradients[1]));
}

TEST(ForwardBackward, CountsTokensWithoutAnAdvantage) {
  const Parameters policy = make_policy();
  std::vector<Sample> samples(2);
  for (Sample& sample : samples) {
    sample.ids = {1, 2, 3, 4};
    sample.loss_mask = {0, 0, 1, 1};
    sample.advantages = {1.0f};
  }
  samples[1].advantages = {0.0f};
  for (const char* reduction : {"token_mean", "seq_mean_token_mean"}) {
    Trainer trainer(policy, spec_of(with("reinforce", {{"reduction", std::string(reduction)}})),
                    gradient_table());
    const double alone = trainer.forward_backward({&samples[0], 1}, {}).loss;
    const PassResult both = trainer.forward_backward(samples, {});
    EXPECT_NEAR(both.loss, 0.5 * alone, 1e-6) << reduction;
    EXPECT_EQ(both.trained_tokens, 4);
    EXPECT_EQ(trainer.denominator_of_samples(samples), reduction[0] == 't' ? 4.0 : 2.0);
  }
}

TEST(ForwardBackward, OfNothingTrainedAddsNothing) {
  const Parameters policy = make_policy();
  Trainer trainer(policy, spec_of("reinforce"), gradient_table());
  std::vector<Sample> samples = make_samples(1, 3);
  for (Sample& sample : samples) std::fill(sample.loss_mask.begin(), sample.loss_mask.end(), 0);
  const PassResult pass = trainer.forward_backward(samples, {});
  EXPECT_EQ(pass.failure, "");
  EXPECT_EQ(pass.loss, 0.0);
  EXPECT_EQ(pass.tokens, 0);
  EXPECT_EQ(trainer.denominator_of_samples(samples), 0.0);
  const BatchResult batch = trainer.train_batch(samples);
  EXPECT_EQ(batch.failure, "");
  EXPECT_EQ(batch.optimizer_steps, 0);
  EXPECT_EQ(trainer.optimizer_steps(), 0);
}

TEST(DenominatorOfSamples, DoesNotDependOnHowTheyAreCut) {
  const Parameters policy = make_policy();
  const std::vector<Sample> samples = testing::rolled_out(policy, 3, 15);
  for (const LossCase& loss : loss_cases()) {
    const LossSpec spec = spec_of(loss.preset);
    if (spec.reads(Stream::teacher) || spec.denominator_depends_on_pi()) continue;
    Trainer tiny(policy, spec, gradient_table(1)), huge(policy, spec, gradient_table(100000));
    EXPECT_EQ(tiny.denominator_of_samples(samples), huge.denominator_of_samples(samples))
        << loss.preset.label();
  }
}

TEST(DenominatorOfSamples, IsRefusedWhereOnlyThePassTellsIt) {
  const Parameters policy = make_policy();
  const std::vector<Sample> samples = testing::rolled_out(policy, 3, 5);
  Trainer trainer(policy, spec_of(with("icepop", {{"denominator", std::string("kept")}})),
                  gradient_table());
  testing::expect_refused([&] { trainer.denominator_of_samples(samples); },
                          {"icepop", "denominator"});
}

TEST(ForwardBackward, RefusesStreamsThatAreMissingOrDoNotFit) {
  const Parameters policy = make_policy();
  const LossCase loss{with("grpo+tis", {{"ref_kl", 0.1}})};
  Trainer trainer(policy, spec_of(loss.preset), gradient_table());
  const GivenBatch good = batch_for(loss, trainer, 3);
  const auto refused = [&](const std::function<void(GivenBatch&)>& spoil,
                           const std::vector<std::string>& words) {
    GivenBatch batch = good;
    spoil(batch);
    testing::expect_refused([&] { trainer.forward_backward(batch.samples, batch.streams); }, words);
  };
  refused([](GivenBatch& b) { b.streams.prox.clear(); }, {"grpo+tis", "prox"});
  refused([](GivenBatch& b) { b.streams.ref.clear(); }, {"grpo+tis", "ref"});
  refused([](GivenBatch& b) { b.streams.prox.pop_back(); }, {"prox", "16", "17"});
  refused([](GivenBatch& b) { b.streams.ref[4].pop_back(); }, {"sample 4", "ref"});
  refused(
      [](GivenBatch& b) {
        for (Sample& s : b.samples) s.rollout.clear();
      },
      {"grpo+tis", "rollout"});
  EXPECT_EQ(take_gradient(trainer).flat()[0], 0.0f);
}

}  // namespace
}  // namespace leeway
