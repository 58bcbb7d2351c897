// Adapters on torch devices, the CPU and a GPU if available, against the native backend, and their
// way to the engine over a base that both share.

#include <gtest/gtest.h>
#include <torch/cuda.h>

#include <cmath>

#include "engine/test_support.h"
#include "torch/device_weights.h"
#include "torch/shared_base.h"
#include "torch/torch_sampling.h"
#include "torch/torch_training.h"
#include "trainer/test_support.h"

namespace leeway {
namespace {

using testing::make_policy;
using testing::rolled_out;
using testing::same_bits;
using testing::small_table;
using testing::spec_of;

const std::vector<std::string> kAll(kLoraTargets.begin(), kLoraTargets.end());

Parameters adapter_over(Parameters base, const std::vector<std::string>& targets = kAll) {
  Parameters adapter(std::make_shared<const Parameters>(std::move(base)),
                     {.rank = 8, .alpha = 16.0, .targets = targets, .base_path = ""});
  Rng rng(4);
  for (float& value : adapter.flat()) value = static_cast<float>(0.1 * rng.normal());
  return adapter;
}

MakeTrainingBackend on(const torch::Device& device, torch::ScalarType compute) {
  return [device, compute](TrainingWeights weights, const TrainerTable& table) {
    return make_torch_training(std::move(weights), table, device, compute);
  };
}

// The CPU in float32, a GPU in bf16.
std::vector<MakeTrainingBackend> backends() {
  std::vector<MakeTrainingBackend> list = {on(torch::kCPU, torch::kFloat)};
  if (torch::cuda::is_available()) list.push_back(on({torch::kCUDA, 0}, torch::kBFloat16));
  return list;
}

// In float32 the same numbers; what is left is the order of sums.
TEST(TorchAdapter, TakesTheStepsOfTheNativeBackend) {
  TrainerTable plain = small_table(), recomputed = plain, bonus = plain, of_base = plain;
  recomputed.recompute_activations = Recompute::layer, recomputed.optimizer.weight_decay = 0.1;
  bonus.entropy_bonus = 0.01, of_base.reference = "base";
  struct Case {
    const char* name;
    LossSpec spec;
    TrainerTable table;
    std::vector<std::string> targets;
  };
  for (const Case& c :
       {Case{"icepop", spec_of("icepop"), plain, kAll},
        Case{"recomputed", spec_of("icepop"), recomputed, kAll},
        Case{"some modules", spec_of("icepop"), plain, {"k_proj", "down_proj"}},
        Case{"entropy", spec_of("icepop"), bonus, {"v_proj", "up_proj"}},
        Case{"across the batch", spec_of("m2po"), plain, kAll},
        Case{"reference", spec_of(testing::with("grpo", {{"ref_kl", 0.1}})), plain, kAll},
        Case{"the base as reference", spec_of(testing::with("grpo", {{"ref_kl", 0.1}})), of_base,
             kAll}}) {
    const Parameters policy = adapter_over(make_policy(), c.targets);
    Trainer native(policy, c.spec, c.table);
    Trainer torch(policy, c.spec, c.table, on(torch::kCPU, torch::kFloat));
    for (uint64_t batch = 0; batch < 3; ++batch) {
      const std::vector<Sample> samples = rolled_out(policy, batch, 9, 0.05);
      const BatchResult expected = native.train_batch(samples), got = torch.train_batch(samples);
      ASSERT_EQ(expected.failure, "") << c.name;
      ASSERT_EQ(got.failure, "") << c.name;
      EXPECT_NEAR(got.loss, expected.loss, 1e-4 * (1.0 + std::abs(expected.loss))) << c.name;
      EXPECT_NEAR(got.grad_norm, expected.grad_norm, 1e-3 * expected.grad_norm) << c.name;
    }
    // Adam divides the smallest gradients by their own size, and with them their rounding.
    testing::expect_near(torch.parameters(), native.parameters(), 1e-2, c.name);
    EXPECT_EQ(torch.parameters().base(), policy.base());
  }
}

TEST(TorchAdapter, HasTheGradientOfTheNativeBackend) {
  const Parameters policy = adapter_over(make_policy());
  const std::vector<Sample> samples = rolled_out(policy, 1, 9, 0.05);
  const auto gradient = [&](const MakeTrainingBackend& backend) {
    Trainer trainer(policy, spec_of("reinforce"), testing::gradient_table(), backend);
    trainer.forward_backward(samples, {});
    EXPECT_EQ(trainer.optim_step().failure, "");
    return trainer.state().optimizer.first_moment();
  };
  testing::expect_near(gradient(on(torch::kCPU, torch::kFloat)), gradient({}), 1e-4, "gradient");
}

// In bf16, with a base that is rounded too: what is left is a few hundredths of the whole.
TEST(TorchAdapter, HasNearlyTheGradientOfTheNativeBackendOnAGpu) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no GPU: compiled, not run";
  const Parameters policy = adapter_over(make_policy());
  const std::vector<Sample> samples = rolled_out(policy, 1, 9, 0.05);
  for (const Recompute recompute : {Recompute::off, Recompute::selective, Recompute::layer}) {
    TrainerTable table = testing::gradient_table();
    table.recompute_activations = recompute;
    const auto gradient = [&](const MakeTrainingBackend& backend) {
      Trainer trainer(policy, spec_of("reinforce"), table, backend);
      trainer.forward_backward(samples, {});
      EXPECT_EQ(trainer.optim_step().failure, "");
      return trainer.state().optimizer.first_moment();
    };
    const Parameters expected = gradient({});
    const Parameters got = gradient(on({torch::kCUDA, 0}, torch::kBFloat16));
    double difference = 0.0, whole = 0.0;
    for (size_t i = 0; i < expected.flat().size(); ++i) {
      difference += std::pow(got.flat()[i] - expected.flat()[i], 2);
      whole += std::pow(expected.flat()[i], 2);
    }
    EXPECT_LT(std::sqrt(difference / whole), 0.05) << name_of(recompute);
  }
}

TEST(TorchAdapter, AStateForLaterIsThatOfItsMoment) {
  for (const MakeTrainingBackend& backend : backends()) {
    for (const OptimizerState moments : {OptimizerState::float32, OptimizerState::int8}) {
      const Parameters policy = adapter_over(make_policy());
      TrainerTable table = small_table();
      table.optimizer_state = moments;
      Trainer trainer(policy, spec_of("icepop"), table, backend);
      ASSERT_EQ(trainer.train_batch(rolled_out(policy, 1, 9, 0.05)).failure, "");
      const TrainingState now = trainer.state();
      const auto later = trainer.state_later();
      ASSERT_EQ(trainer.train_batch(rolled_out(policy, 2, 9, 0.05)).failure, "");
      const TrainingState kept = later();
      EXPECT_TRUE(same_bits(kept.policy, now.policy));
      EXPECT_EQ(kept.policy.base(), policy.base());
      EXPECT_TRUE(same_bits(kept.optimizer.first_moment(), now.optimizer.first_moment()));
      EXPECT_TRUE(same_bits(kept.optimizer.second_moment(), now.optimizer.second_moment()));
      EXPECT_EQ(kept.optimizer.steps(), now.optimizer.steps());
      EXPECT_FALSE(same_bits(trainer.state().policy, now.policy));

      const testing::TestFolder folder;
      trainer.save(folder.path());
      Trainer second(adapter_over(make_policy()), spec_of("icepop"), table, backend);
      second.load(folder.path());
      EXPECT_TRUE(same_bits(second.parameters(), trainer.parameters()));
      EXPECT_EQ(second.snapshot(2)->checksum(), checksum(trainer.parameters()));
    }
  }
}

TEST(TorchAdapter, GoesOnFromTheFilesOfEitherBackend) {
  const Parameters policy = adapter_over(make_policy());
  const testing::TestFolder folder;
  Trainer native(policy, spec_of("icepop"), small_table());
  native.train_batch(rolled_out(policy, 1, 9, 0.05));
  native.save(folder.path());
  Trainer torch(policy, spec_of("icepop"), small_table(), on(torch::kCPU, torch::kFloat));
  torch.load(folder.path());
  EXPECT_TRUE(same_bits(torch.parameters(), native.parameters()));
  const std::vector<Sample> samples = rolled_out(policy, 2, 9, 0.05);
  native.train_batch(samples), torch.train_batch(samples);
  testing::expect_near(torch.parameters(), native.parameters(), 1e-3, "after the second");
  torch.save(folder.path());
  native.load(folder.path());
  EXPECT_TRUE(same_bits(torch.parameters(), native.parameters()));
  EXPECT_EQ(native.optimizer_steps(), 2);
}

TEST(TorchAdapter, TheBaseIsOneCopyForAllThatReadIt) {
  const Parameters policy = adapter_over(make_policy());
  const auto first = base_on_device(policy.base(), torch::kCPU, torch::kFloat);
  EXPECT_EQ(base_on_device(policy.base(), torch::kCPU, torch::kFloat), first);
  EXPECT_NE(base_on_device(policy.base(), torch::kCPU, torch::kBFloat16), first);
  const auto other = std::make_shared<const Parameters>(make_policy());
  EXPECT_NE(base_on_device(other, torch::kCPU, torch::kFloat), first);
}

// As the engine without torch samples, from the trainer's snapshot and from the host.
TEST(TorchAdapter, IsSampledFromTheTrainersMemory) {
  for (const Family family : {Family::qwen3, Family::qwen2, Family::llama}) {
    const Parameters policy = adapter_over(testing::tiny_weights(family, 1));
    Trainer trainer(policy, spec_of("icepop"), small_table(), on(torch::kCPU, torch::kFloat));
    EngineOptions options = testing::options_of(64), native = options;
    options.frozen = FrozenWeights::in_place;
    options.backend = make_torch_sampling(torch::kCPU, torch::kFloat);
    Engine engine(*trainer.snapshot(0), options), by_host(policy, 0, options);
    Engine plain(policy, 0, native);
    const auto sampled = [](Engine& from) {
      for (const Request& request : testing::assorted(6, 3)) from.submit(request);
      return testing::run_to_the_end(from);
    };
    const auto expected = sampled(plain), got = sampled(engine), host = sampled(by_host);
    ASSERT_EQ(got.size(), expected.size());
    for (const auto& [key, sample] : expected) {
      testing::expect_same(got.at(key), host.at(key));
      ASSERT_EQ(got.at(key).ids, sample.ids);
      for (size_t t = 0; t < sample.ids.size(); ++t) {
        EXPECT_NEAR(got.at(key).raw_logprobs[t], sample.raw_logprobs[t], 1e-4);
      }
    }
    trainer.train_batch(rolled_out(policy, 5, 9, 0.05));
    const auto next = trainer.snapshot(1);
    EXPECT_EQ(next->host().base(), policy.base());
    EXPECT_TRUE(same_bits(next->host(), trainer.parameters()));
    engine.update_weights(next);
    by_host.update_weights(std::make_shared<const PolicySnapshot>(trainer.parameters(), 1));
    const auto later = sampled(engine), later_host = sampled(by_host);
    for (const auto& [key, sample] : later_host) testing::expect_same(later.at(key), sample);
  }
}

// As a server does: the model, an adapter over it, one of another rank, and the model again.
TEST(TorchAdapter, TakesThePlaceOfOtherWeightsInASampler) {
  const auto base = std::make_shared<const Parameters>(testing::tiny_weights(Family::qwen3, 1));
  EngineOptions native = testing::options_of(64), options = native;
  options.backend = make_torch_sampling(torch::kCPU, torch::kFloat);
  Engine engine(*base, 0, options), plain(*base, 0, native);
  const auto expect_the_same = [&](const Parameters& weights, PolicyVersion version) {
    const auto next = std::make_shared<const PolicySnapshot>(weights, version);
    engine.update_weights(next), plain.update_weights(next);
    for (Engine* each : {&engine, &plain}) {
      for (const Request& request : testing::assorted(6, 3)) each->submit(request);
    }
    const auto got = testing::run_to_the_end(engine), expected = testing::run_to_the_end(plain);
    ASSERT_EQ(got.size(), expected.size());
    for (const auto& [key, sample] : expected) EXPECT_EQ(got.at(key).ids, sample.ids) << version;
  };
  Rng rng(8);
  PolicyVersion version = 1;
  for (const int64_t rank : {8, 3}) {
    Parameters adapter(base, {.rank = rank, .alpha = 16.0, .targets = kAll, .base_path = ""});
    for (float& value : adapter.flat()) value = static_cast<float>(0.1 * rng.normal());
    expect_the_same(adapter, version++);
  }
  expect_the_same(*base, version++);
}

}  // namespace
}  // namespace leeway
