// Adapters on torch devices, the CPU and a GPU if available, against the native backend, and their
// way to the engine over a base that both share.

#include <gtest/gtest.h>
#include <torch/cuda.h>

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

// In float32 the same numbers; what is left is the order of sums.
TEST(TorchAdapter, TakesTheStepsOfTheNativeBackend) {
  TrainerTable plain = small_table(), recomputed = plain, bonus = plain;
  recomputed.recompute_activations = Recompute::layer, recomputed.optimizer.weight_decay = 0.1;
  bonus.entropy_bonus = 0.01;
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
        Case{"reference", spec_of(testing::with("grpo", {{"ref_kl", 0.1}})), plain, kAll}}) {
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

}  // namespace
}  // namespace leeway
