// A run whose trainer has no room for snapshots with all digits, as on a GPU that a large model
// fills: it samples and evaluates with rounded ones, and writes its last weights as they are.

#include <gtest/gtest.h>

#include <algorithm>

#include "base/half.h"
#include "config/given.h"
#include "run/test_support.h"
#include "run/training_run.h"
#include "trainer/cpu_backend.h"

namespace leeway {
namespace {

Parameters rounded(Parameters weights) {
  for (float& value : weights.flat()) value = from_bf16(to_bf16(value));
  return weights;
}
bool same_numbers(const Parameters& a, const Parameters& b) {
  return std::ranges::equal(a.flat(), b.flat());
}

class RoundedWeights final : public DeviceWeights {
 public:
  explicit RoundedWeights(const Parameters& of) : weights_(rounded(of)) {}
  void copy_to(Parameters& host) const override { host = weights_; }
  std::string not_finite_text() const override { return leeway::not_finite_text(weights_); }
  uint32_t checksum() const override { return leeway::checksum(weights_); }
  bool are_rounded() const override { return true; }

 private:
  const Parameters weights_;
};

// The CPU's backend, but for its snapshots.
class RoundingBackend final : public TrainingBackend {
 public:
  explicit RoundingBackend(std::unique_ptr<TrainingBackend> inner) : inner_(std::move(inner)) {}

  std::shared_ptr<const PolicySnapshot> snapshot(PolicyVersion version) override {
    return std::make_shared<const PolicySnapshot>(
        config(), std::make_unique<RoundedWeights>(inner_->parameters()), version);
  }

  const Parameters& parameters() override { return inner_->parameters(); }
  const ModelConfig& config() const override { return inner_->config(); }
  void score(PolicyKind policy, const MicroBatch& batch, RowValues& values) override {
    inner_->score(policy, batch, values);
  }
  double loss_pass(const MicroBatch& batch, const LossPass& pass, MetricSums& metrics,
                   RowValues& values) override {
    return inner_->loss_pass(batch, pass, metrics, values);
  }
  void gradient_pass(const MicroBatch& batch, std::span<const float> g, double entropy_gradient,
                     RowValues& values) override {
    inner_->gradient_pass(batch, g, entropy_gradient, values);
  }
  std::vector<SlotResult> run_slots(const PackedBatch& batch, std::span<const GradientSlot> slots,
                                    const SlotPass& pass, std::span<const float> g) override {
    return inner_->run_slots(batch, slots, pass, g);
  }
  int64_t slots() const override { return inner_->slots(); }
  double gradient_norm() override { return inner_->gradient_norm(); }
  void zero_gradients() override { inner_->zero_gradients(); }
  void step(const OptimizerTable& table, double rate, double scale) override {
    inner_->step(table, rate, scale);
  }
  int64_t steps() const override { return inner_->steps(); }
  TrainingState state() override { return inner_->state(); }
  void load(const std::string& folder) override { inner_->load(folder); }

 private:
  const std::unique_ptr<TrainingBackend> inner_;
};

TEST(RoundedRun, WritesTheLastWeightsWithAllDigits) {
  for (const char* lag : {"0", "1"}) {
    const TestFolder folder;
    const Catalog catalog;
    RunSetup setup(tiny_config(catalog, folder / "run",
                               {"output.weights_every=2", "checkpoint.every=3",
                                std::string("orchestrator.max_off_policy_steps=") + lag}));
    setup.own_backend = [](TrainingWeights weights, const TrainerTable& table) {
      return std::make_unique<RoundingBackend>(make_cpu_training(std::move(weights), table));
    };
    RecordingProgress progress;
    const RunSummary summary = run_training(setup, catalog, {}, progress, [] { return false; });
    ASSERT_EQ(summary.end, RunSummary::End::finished) << summary.reason;
    EXPECT_EQ(summary.steps, 6);
    EXPECT_EQ(progress.last_evaluated, 6);

    const Parameters last = load_parameters(summary.weights);
    EXPECT_TRUE(same_numbers(last, load_parameters(folder / "run/checkpoints/step_6")));
    EXPECT_FALSE(same_numbers(last, rounded(last))) << "bf16 has fewer digits";
    const Parameters early = load_parameters(folder / "run/weights/step_2");
    EXPECT_TRUE(same_numbers(early, rounded(early)));
    EXPECT_EQ(std::ranges::count_if(progress.notes,
                                    [](const std::string& note) {
                                      return note.find("rounded to bf16") != std::string::npos;
                                    }),
              1);
  }
}

}  // namespace
}  // namespace leeway
