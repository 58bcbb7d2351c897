// The backend on torch devices, the CPU and a GPU if available, against the native one: in float32
// the same numbers, steps, failures and files.

#include "torch/torch_training.h"

#include <fmt/ranges.h>
#include <gtest/gtest.h>
#include <torch/cuda.h>

#include <algorithm>

#include "model/gpu_sizes.h"
#include "trainer/test_support.h"
#ifdef LEEWAY_CUDA
#include "cuda/head_rows.h"
#include "cuda/kv_pages.h"
#include "cuda/layer_gradients.h"
#endif

namespace leeway {
namespace {

using testing::make_policy;
using testing::rolled_out;
using testing::same_bits;
using testing::small_table;
using testing::spec_of;

std::vector<torch::Device> devices() {
  std::vector<torch::Device> list = {torch::kCPU};
  if (torch::cuda::is_available()) list.emplace_back(torch::kCUDA, 0);
  return list;
}

MakeTrainingBackend on(const torch::Device& device, torch::ScalarType compute = torch::kFloat) {
  return [device, compute](TrainingWeights weights, const TrainerTable& table) {
    return make_torch_training(std::move(weights), table, device, compute);
  };
}

void expect_near(const TokenValues& got, const TokenValues& expected, double tolerance,
                 const std::string& where) {
  ASSERT_EQ(got.size(), expected.size()) << where;
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(got[i].size(), expected[i].size()) << where;
    for (size_t t = 0; t < got[i].size(); ++t) {
      ASSERT_NEAR(got[i][t], expected[i][t], tolerance) << where << " sample " << i << " " << t;
    }
  }
}

void expect_near(const MetricSums& got, const MetricSums& expected, const std::string& where) {
  const std::vector<double> a = got.flatten(), b = expected.flatten();
  for (size_t i = 0; i + kRatioBins < a.size(); ++i) {
    if (a[i] == b[i]) continue;  // infinite where a maximum has seen nothing
    EXPECT_NEAR(a[i], b[i], 1e-3 * (1.0 + std::abs(b[i]))) << where << " sum " << i;
  }
}

struct Case {
  std::string name;
  LossSpec spec;
  TrainerTable table;
  bool tied = false;
};

// REINFORCE with a clipped current/rollout weight that is a function: CISPO, as in
// examples/09_plugin.
LossSpec reinforce_with_a_function(double high) {
  LossSpec spec = spec_of("reinforce");
  spec.corrections.push_back(
      make_correction("mine", "min(pi/rollout, high)", {Stream::rollout},
                      [high](const auto& sequence, auto effect) {
                        for (size_t t = 0; t < sequence.mask.size(); ++t) {
                          if (!sequence.mask[t]) continue;
                          const auto ratio = std::exp(sequence.pi[t] - sequence.rollout[t]);
                          effect.weights[t] = std::min(ratio, static_cast<decltype(ratio)>(high));
                        }
                      }));
  return spec;
}

std::vector<Case> cases() {
  TrainerTable plain = small_table(), steps = plain, bonus = plain, recomputed = plain;
  steps.minibatches = 2;
  steps.optimizer_steps = OptimizerSteps::minibatch;
  bonus.entropy_bonus = 0.01;
  recomputed.recompute_activations = Recompute::layer;
  recomputed.optimizer.weight_decay = 0.1;
  return {
      {"icepop", spec_of("icepop"), plain},
      {"icepop, tied", spec_of("icepop"), plain, true},
      {"icepop, recomputed, with decay", spec_of("icepop"), recomputed, true},
      {"gspo", spec_of("gspo"), plain},
      {"ppo, prox is pi", spec_of("ppo"), plain},
      {"ppo, two steps a batch", spec_of("ppo"), steps, true},
      {"entropy bonus", spec_of("icepop"), bonus},
      {"entropy bonus, tied", spec_of("icepop"), bonus, true},
      {"across the batch", spec_of("m2po"), plain},
      {"across the batch, with a bonus", spec_of("m2po"), bonus},
      {"reference", spec_of(testing::with("grpo", {{"ref_kl", 0.1}})), plain},
      {"a function of the host", reinforce_with_a_function(1.02), plain},
      {"a function of the host, with a bonus", reinforce_with_a_function(1.02), bonus, true},
  };
}

void expect_native_steps(const Case& c, const torch::Device& device) {
  const double slack = device.is_cpu() ? 1.0 : 10.0;
  const Parameters policy = make_policy(1, c.tied);
  Trainer native(policy, c.spec, c.table), torch(policy, c.spec, c.table, on(device));
  for (uint64_t batch = 0; batch < 3; ++batch) {
    const std::string where = device.str() + ", " + c.name + ", batch " + std::to_string(batch);
    const std::vector<Sample> samples = rolled_out(policy, batch, 9, 0.05);
    const BatchResult expected = native.train_batch(samples), got = torch.train_batch(samples);
    ASSERT_EQ(expected.failure, "") << where;
    ASSERT_EQ(got.failure, "") << where;
    EXPECT_EQ(got.optimizer_steps, expected.optimizer_steps);
    EXPECT_NEAR(got.loss, expected.loss, slack * 1e-4 * (1.0 + std::abs(expected.loss))) << where;
    EXPECT_NEAR(got.grad_norm, expected.grad_norm, slack * 1e-3 * expected.grad_norm) << where;
    EXPECT_NEAR(got.passes.entropy, expected.passes.entropy, slack * 1e-3) << where;
    // Weights drift apart by the rounding of steps that Adam has normalised.
    expect_near(got.passes.logprobs, expected.passes.logprobs, slack * (batch == 0 ? 1e-5 : 1e-3),
                where);
    if (batch == 0) expect_near(got.passes.metrics, expected.passes.metrics, where);
  }
  EXPECT_EQ(torch.optimizer_steps(), native.optimizer_steps());
  testing::expect_near(torch.parameters(), native.parameters(), slack * 1e-3, c.name);
}

TEST(TorchTraining, TakesTheStepsOfTheNativeBackend) {
  for (const torch::Device& device : devices()) {
    for (const Case& c : cases()) expect_native_steps(c, device);
  }
}

TEST(TorchTraining, ACorrectionThatIsAFunctionActsAsTheBuiltInLossDoes) {
  const LossSpec mine = reinforce_with_a_function(1.02);
  const LossSpec cispo = spec_of(testing::with("cispo", {{"ratio_high", 1.02}}));
  const Parameters policy = make_policy(2);
  const std::vector<Sample> samples = rolled_out(policy, 5, 9, 0.05);
  for (const torch::Device& device : devices()) {
    Trainer a(policy, mine, testing::gradient_table(), on(device));
    Trainer b(policy, cispo, testing::gradient_table(), on(device));
    const PassResult got = a.forward_backward(samples, {}),
                     expected = b.forward_backward(samples, {});
    EXPECT_NEAR(got.loss, expected.loss, 1e-5 * (1.0 + std::abs(expected.loss))) << device;
    // One device makes both: only the loss in between is computed in another place.
    testing::expect_near(testing::take_gradient(a), testing::take_gradient(b), 1e-5, device.str());
  }
}

void expect_native_gradient(const Case& c, const torch::Device& device) {
  const double slack = device.is_cpu() ? 1.0 : 10.0;
  const std::string where = device.str() + ", " + c.name;
  const Parameters policy = make_policy(3, c.tied);
  TrainerTable table = testing::gradient_table();
  table.entropy_bonus = c.table.entropy_bonus;
  table.recompute_activations = c.table.recompute_activations;
  Trainer native(policy, c.spec, table), torch(policy, c.spec, table, on(device));
  const std::vector<Sample> samples = rolled_out(policy, 7, 9, 0.05);
  PolicyStreams streams;
  streams.prox_is_pi = c.spec.reads(Stream::prox);
  if (c.spec.reads(Stream::ref)) {
    streams.ref = native.ref_forward(samples);
    expect_near(torch.ref_forward(samples), streams.ref, slack * 1e-5, where);
  }
  expect_near(torch.forward(samples), native.forward(samples), slack * 1e-5, where);
  for (int pass = 0; pass < 2; ++pass) {  // they add up
    const PassResult expected = native.forward_backward(samples, streams);
    const PassResult got = torch.forward_backward(samples, streams);
    EXPECT_NEAR(got.loss, expected.loss, slack * 1e-5 * (1.0 + std::abs(expected.loss))) << where;
  }
  testing::expect_near(testing::take_gradient(torch), testing::take_gradient(native), slack * 1e-4,
                       where);
}

TEST(TorchTraining, GivesTheNativeGradient) {
  for (const torch::Device& device : devices()) {
    for (const Case& c : cases()) expect_native_gradient(c, device);
  }
}

TEST(TorchTraining, LoadsWhatTheNativeBackendSavedAndTheOtherWayRound) {
  const Parameters policy = make_policy();
  const LossSpec spec = spec_of("icepop");
  const MakeTrainingBackend torch = on(devices().back());
  for (const bool from_torch : {true, false}) {
    Trainer first(policy, spec, small_table(), from_torch ? torch : MakeTrainingBackend());
    first.train_batch(rolled_out(policy, 0, 8));
    first.train_batch(rolled_out(policy, 1, 8));
    const testing::TestFolder folder;
    first.save(folder.path());
    Trainer second(make_policy(9), spec, small_table(), from_torch ? MakeTrainingBackend() : torch);
    second.load(folder.path());
    EXPECT_EQ(second.optimizer_steps(), 2);
    EXPECT_TRUE(same_bits(second.parameters(), first.parameters()));
    first.train_batch(rolled_out(policy, 2, 8));
    second.train_batch(rolled_out(policy, 2, 8));
    testing::expect_near(second.parameters(), first.parameters(), 1e-3, "after the third");
  }
}

TEST(TorchTraining, AStateForLaterIsThatOfItsMoment) {
  std::vector<MakeTrainingBackend> backends{{}};  // the native one
  for (const torch::Device& device : devices()) backends.push_back(on(device));
  for (const MakeTrainingBackend& backend : backends) {
    const Parameters policy = make_policy(1, true);
    Trainer trainer(policy, spec_of("icepop"), small_table(), backend);
    ASSERT_EQ(trainer.train_batch(rolled_out(policy, 1, 9, 0.05)).failure, "");
    const TrainingState now = trainer.state();
    const auto later = trainer.state_later();
    ASSERT_EQ(trainer.train_batch(rolled_out(policy, 2, 9, 0.05)).failure, "");
    const TrainingState kept = later();
    EXPECT_TRUE(same_bits(kept.policy, now.policy));
    EXPECT_TRUE(same_bits(kept.optimizer.first_moment(), now.optimizer.first_moment()));
    EXPECT_TRUE(same_bits(kept.optimizer.second_moment(), now.optimizer.second_moment()));
    EXPECT_EQ(kept.optimizer.steps(), now.optimizer.steps());
    EXPECT_FALSE(same_bits(trainer.state().policy, now.policy));
  }
}

// Saved in float32, the moments come back as the codes they were.
TEST(TorchTraining, ARunWithCodedMomentsGoesOnBitForBit) {
  const Parameters policy = make_policy(1, true);
  TrainerTable table = small_table();
  table.optimizer_state = OptimizerState::int8;
  table.optimizer.weight_decay = 0.1;
  Trainer first(policy, spec_of("icepop"), table, on(torch::kCPU));
  for (uint64_t batch = 0; batch < 3; ++batch) first.train_batch(rolled_out(policy, batch, 8));
  const testing::TestFolder folder;
  first.save(folder.path());
  Trainer second(make_policy(9, true), spec_of("icepop"), table, on(torch::kCPU));
  second.load(folder.path());
  for (uint64_t batch = 3; batch < 6; ++batch) {
    first.train_batch(rolled_out(policy, batch, 8));
    second.train_batch(rolled_out(policy, batch, 8));
    EXPECT_TRUE(same_bits(second.parameters(), first.parameters())) << batch;
  }
  const TrainingState a = first.state(), b = second.state();
  EXPECT_TRUE(same_bits(a.optimizer.first_moment(), b.optimizer.first_moment()));
  EXPECT_TRUE(same_bits(a.optimizer.second_moment(), b.optimizer.second_moment()));
}

TEST(TorchTraining, CodedMomentsLearnAsFloat32OnesDo) {
  for (const torch::Device& device : devices()) {
    const Parameters policy = make_policy(1, true);
    TrainerTable table = small_table();
    Trainer full(policy, spec_of("reinforce"), table, on(device));
    table.optimizer_state = OptimizerState::int8;
    Trainer coded(policy, spec_of("reinforce"), table, on(device));
    std::vector<Sample> samples = rolled_out(policy, 4, 9);
    for (Sample& sample : samples) sample.advantages = {1.0f};
    double first = 0.0, expected = 0.0, got = 0.0;
    for (int step = 0; step < 40; ++step) {
      const BatchResult by_full = full.train_batch(samples), by_coded = coded.train_batch(samples);
      ASSERT_EQ(by_coded.failure, "") << device.str();
      expected = by_full.loss, got = by_coded.loss;
      if (step == 0) first = got;
    }
    // The loss falls to a fraction of what it was; the way there is the same within a few percent
    // of that.
    EXPECT_LT(expected, 0.5 * first) << device.str();
    EXPECT_NEAR(got, expected, 0.03 * first) << device.str();
  }
}

TEST(TorchTraining, AFolderThatIsNoStateChangesNothing) {
  const Parameters policy = make_policy();
  Trainer trainer(policy, spec_of("icepop"), small_table(), on(torch::kCPU));
  trainer.train_batch(rolled_out(policy, 0, 8));
  const Parameters before = trainer.parameters();
  const testing::TestFolder folder;
  EXPECT_THROW(trainer.load(folder.path()), Error);
  EXPECT_TRUE(same_bits(trainer.parameters(), before));
  EXPECT_EQ(trainer.optimizer_steps(), 1);
}

TEST(TorchTraining, WeightsThatAreNotFiniteAreReportedAndLeftAlone) {
  for (const torch::Device& device : devices()) {
    for (const float bad : {testing::kNan, HUGE_VALF}) {
      for (const char* preset : {"reinforce", "icepop", "m2po"}) {
        const Parameters good = make_policy();
        Parameters policy = good;
        policy.of(1)[5] = bad;
        Trainer native(policy, spec_of(preset), small_table());
        Trainer torch(policy, spec_of(preset), small_table(), on(device));
        const std::vector<Sample> samples = rolled_out(good, 3, 9);
        const BatchResult expected = native.train_batch(samples), got = torch.train_batch(samples);
        EXPECT_NE(got.failure, "") << preset;
        // A GPU only knows that the loss is not a number; the CPU names the token.
        if (device.is_cpu()) {
          EXPECT_EQ(got.failure, expected.failure) << preset;
        }
        EXPECT_EQ(got.optimizer_steps, 0);
        EXPECT_TRUE(same_bits(torch.parameters(), policy)) << preset;
      }
    }
  }
}

TEST(TorchTraining, AFailedBatchLeavesNoGradientBehind) {
  for (const torch::Device& device : devices()) {
    const Parameters policy = make_policy();
    TrainerTable table = small_table();
    table.max_tokens = 1;
    Trainer trainer(policy, spec_of("is"), table, on(device));
    Trainer control(policy, spec_of("is"), table, on(device));
    std::vector<Sample> bad = rolled_out(policy, 50, 8);
    for (size_t t = 0; t < bad[4].ids.size(); ++t) {
      if (bad[4].loss_mask[t] != 0) bad[4].rollout[t] = -300.0f;
    }
    bad[4].advantages = {1.0f};
    EXPECT_NE(trainer.train_batch(bad).failure, "");
    EXPECT_TRUE(same_bits(trainer.parameters(), policy));
    EXPECT_EQ(trainer.train_batch(rolled_out(policy, 1, 8)).failure, "");
    EXPECT_EQ(control.train_batch(rolled_out(policy, 1, 8)).failure, "");
    testing::expect_near(trainer.parameters(), control.parameters(), device.is_cpu() ? 0.0 : 1e-5,
                         device.str());
  }
}

// The copies that passes read follow the weights: the loss develops as in float32.
void expect_learning_in_half_precision(const torch::Device& device, bool tied) {
  const std::string where = device.str() + (tied ? ", tied" : "");
  const Parameters policy = make_policy(1, tied);
  const LossSpec spec = spec_of("reinforce");
  Trainer full(policy, spec, small_table(), on(torch::kCPU));
  TrainerTable table = small_table();
  table.recompute_activations = tied ? Recompute::layer : Recompute::selective;
  Trainer half(policy, spec, table, on(device, torch::kBFloat16));
  std::vector<Sample> samples = rolled_out(policy, 4, 9);
  for (Sample& sample : samples) sample.advantages = {1.0f};
  double first = 0.0, last = 0.0;
  for (int step = 0; step < 6; ++step) {
    const BatchResult expected = full.train_batch(samples), got = half.train_batch(samples);
    ASSERT_EQ(got.failure, "") << where;
    EXPECT_NEAR(got.loss, expected.loss, 0.03 * std::abs(expected.loss)) << where << " " << step;
    EXPECT_NEAR(got.grad_norm, expected.grad_norm, 0.1 * expected.grad_norm)
        << where << " " << step;
    if (step == 0) first = got.loss;
    last = got.loss;
  }
  EXPECT_LT(last, 0.9 * first) << where;
}

#ifdef LEEWAY_CUDA
TEST(GpuSizes, AreThoseOfTheKernels) {
  EXPECT_EQ(kMostGpuHeadDim, cuda::kMostHeadDim);
  EXPECT_EQ(kMostGpuNormWidth, cuda::kMostNormWidth);
  for (const auto type : {cuda::Dtype::bf16, cuda::Dtype::float32}) {
    EXPECT_EQ(kMostGpuRowBytes / cuda::bytes_of(type), cuda::most_vocabulary(type));
  }
}
#endif

TEST(TorchTraining, LearnsInHalfPrecision) {
  for (const torch::Device& device : devices()) {
    for (const bool tied : {false, true}) expect_learning_in_half_precision(device, tied);
  }
}

}  // namespace
}  // namespace leeway
