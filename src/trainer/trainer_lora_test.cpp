// Training an adapter: the same flow as all weights, with a base that nothing changes.

#include <cmath>

#include "model/adapter_io.h"
#include "trainer/test_support.h"
#include "trainer/trainer.h"

namespace leeway {
namespace {

using testing::add_rollouts;
using testing::make_policy;
using testing::make_samples;
using testing::same_bits;
using testing::small_table;
using testing::spec_of;
using testing::TestFolder;
using testing::with;

Parameters make_adapter(bool learned, const std::vector<std::string>& targets = {
                                          "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj",
                                          "up_proj", "down_proj"}) {
  Parameters adapter(std::make_shared<const Parameters>(make_policy()),
                     {.rank = 3, .alpha = 6.0, .targets = targets, .base_path = ""});
  initialise(adapter, 3);
  Rng rng(8);
  for (float& value : adapter.flat()) {
    if (learned) value += static_cast<float>(0.1 * rng.normal());
  }
  return adapter;
}

std::vector<Sample> rolled_out(const Parameters& policy, uint64_t seed, size_t count) {
  std::vector<Sample> samples = make_samples(seed, count);
  add_rollouts(policy, samples, seed + 1);
  return samples;
}

TEST(LoraTrainer, StepsChangeTheAdapterAlone) {
  const Parameters adapter = make_adapter(false);
  const Parameters base = *adapter.base();
  TrainerTable table = small_table();
  table.optimizer.weight_decay = 0.1;
  Trainer trainer(adapter, spec_of("icepop"), table);
  for (uint64_t batch = 0; batch < 3; ++batch) {
    EXPECT_EQ(trainer.train_batch(rolled_out(adapter, batch, 8)).failure, "");
  }
  EXPECT_TRUE(same_bits(*adapter.base(), base));
  EXPECT_EQ(trainer.parameters().base(), adapter.base());
  EXPECT_FALSE(same_bits(trainer.parameters(), adapter));
  const TrainingState state = trainer.state();
  EXPECT_EQ(state.optimizer.first_moment().count(), adapter.count());
  const auto snapshot = trainer.snapshot(3);
  EXPECT_EQ(snapshot->host().base(), adapter.base());
  EXPECT_TRUE(same_bits(snapshot->host(), trainer.parameters()));
}

// However the batch is cut, the weights have the same bits; with several steps on it too.
TEST(LoraTrainer, MicroBatchesChangeNothing) {
  const Parameters adapter = make_adapter(true);
  for (const OptimizerSteps steps : {OptimizerSteps::batch, OptimizerSteps::minibatch}) {
    std::vector<Parameters> results;
    for (const auto& [max_tokens, recompute] :
         std::vector<std::pair<int64_t, Recompute>>{{16384, Recompute::off},
                                                    {20, Recompute::off},
                                                    {20, Recompute::selective},
                                                    {20, Recompute::layer}}) {
      TrainerTable table = small_table();
      table.max_tokens = max_tokens, table.recompute_activations = recompute;
      table.epochs = 2, table.minibatches = 2, table.optimizer_steps = steps;
      Trainer trainer(adapter, spec_of("grpo+tis"), table);
      EXPECT_EQ(trainer.train_batch(rolled_out(adapter, 5, 12)).failure, "");
      results.push_back(trainer.parameters());
    }
    // Between micro-batches the head's chunks differ: the order of its sums does not.
    EXPECT_TRUE(same_bits(results[1], results[2]));
    EXPECT_TRUE(same_bits(results[1], results[3]));
    for (size_t i = 0; i < results[0].flat().size(); ++i) {
      EXPECT_NEAR(results[0].flat()[i], results[1].flat()[i], 1e-4f) << i;
    }
  }
}

// The gradient of the loss by central differences in double would need a model in double; in
// float32, with steps of 1e-2, it agrees to a few percent, which a wrong factor would not.
TEST(LoraTrainer, TheGradientIsThatOfTheLoss) {
  const Parameters adapter = make_adapter(true);
  const std::vector<Sample> samples = rolled_out(adapter, 7, 10);
  const LossSpec spec = spec_of("reinforce");
  const auto loss_of = [&](const Parameters& weights) {
    TrainerTable table = small_table();
    table.optimizer.learning_rate = 0.0;
    Trainer trainer(weights, spec, table);
    return trainer.forward_backward(samples, {}).loss;
  };
  TrainerTable table = testing::gradient_table();
  Trainer trainer(adapter, spec, table);
  trainer.forward_backward(samples, {});
  ASSERT_EQ(trainer.optim_step().failure, "");
  const Parameters gradient = trainer.state().optimizer.first_moment();
  for (size_t i = 0; i < adapter.table().size(); i += 3) {
    // Along the gradient of one matrix: d loss = |g|.
    double norm = 0.0;
    for (const float g : gradient.of(i)) norm += static_cast<double>(g) * g;
    norm = std::sqrt(norm);
    ASSERT_GT(norm, 0.0);
    const double step = 1e-2;
    const auto moved = [&](double by) {
      Parameters weights = adapter;
      for (size_t k = 0; k < weights.of(i).size(); ++k) {
        weights.of(i)[k] += static_cast<float>(by * gradient.of(i)[k] / norm);
      }
      return loss_of(weights);
    };
    EXPECT_NEAR((moved(step) - moved(-step)) / (2.0 * step), norm, 0.03 * norm)
        << adapter.table()[i].name;
  }
}

TEST(LoraTrainer, ClippingSeesTheAdaptersGradient) {
  const Parameters adapter = make_adapter(true, {"o_proj"});
  TrainerTable table = testing::gradient_table();
  table.optimizer.max_grad_norm = 1e-3;
  Trainer trainer(adapter, spec_of("reinforce"), table);
  trainer.forward_backward(rolled_out(adapter, 7, 10), {});
  const OptimResult result = trainer.optim_step();
  EXPECT_GT(result.grad_norm, 1e-3);
  double norm = 0.0;
  const TrainingState state = trainer.state();
  for (const float g : state.optimizer.first_moment().flat()) norm += static_cast<double>(g) * g;
  EXPECT_NEAR(std::sqrt(norm), 1e-3, 1e-8);
}

TEST(LoraTrainer, TheReferenceIsThePolicyWithoutItsAdapter) {
  const LossSpec spec = spec_of(with("grpo", {{"ref_kl", 0.1}}));
  for (const std::string reference : {"initial", "base"}) {
    for (const bool learned : {false, true}) {
      const Parameters adapter = make_adapter(learned);
      TrainerTable table = small_table();
      table.reference = reference;
      Trainer trainer(adapter, spec, table);
      const std::vector<Sample> samples = rolled_out(adapter, 2, 8);
      const TokenValues before = trainer.ref_forward(samples);
      // Held by the adapter here and in the trainer; a second copy would be another object.
      const Parameters& expected = reference == "base" || !learned ? *adapter.base() : adapter;
      EXPECT_EQ(before, Trainer(expected, spec_of("reinforce"), table).forward(samples));
      trainer.train_batch(samples);
      EXPECT_EQ(trainer.ref_forward(samples), before);
      EXPECT_NE(trainer.forward(samples), before);
    }
  }
}

TEST(LoraTrainer, GoesOnFromItsFilesBitForBit) {
  const Parameters adapter = make_adapter(false);
  const TestFolder folder;
  Trainer first(adapter, spec_of("icepop"), small_table());
  first.train_batch(rolled_out(adapter, 0, 8));
  first.save(folder.path());
  EXPECT_EQ(folder.names(), (std::vector<std::string>{
                                "adapter_config.json", "adapter_model.safetensors",
                                "leeway_base.json", "optimizer.safetensors", "trainer.json"}));
  Trainer second(adapter, spec_of("icepop"), small_table());
  second.load(folder.path());
  EXPECT_TRUE(same_bits(first.parameters(), second.parameters()));
  const std::vector<Sample> samples = rolled_out(adapter, 1, 8);
  first.train_batch(samples), second.train_batch(samples);
  EXPECT_TRUE(same_bits(first.parameters(), second.parameters()));
  EXPECT_EQ(check_state_like(adapter, folder.path()).count(), adapter.count());
  EXPECT_EQ(read_steps(folder.path()), 1);

  // One of another rank, of other modules, and one of all weights.
  Trainer other(make_adapter(false, {"q_proj"}), spec_of("icepop"), small_table());
  testing::expect_refused([&] { other.load(folder.path()); }, {"different model"});
  Trainer full(make_policy(), spec_of("icepop"), small_table());
  full.save(folder.path());
  testing::expect_refused([&] { second.load(folder.path()); }, {});
}

}  // namespace
}  // namespace leeway
