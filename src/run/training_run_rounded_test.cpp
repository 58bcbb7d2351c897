// A run whose trainer has no room for snapshots with all digits, as on a GPU that a large model
// fills: it samples and evaluates with rounded ones, and writes its last weights as they are.

#include <gtest/gtest.h>

#include <algorithm>

#include "base/half.h"
#include "config/given.h"
#include "leeway/error.h"
#include "run/test_support.h"
#include "run/training_run.h"
#include "trainer/cpu_backend.h"
#include "trainer/test_backend.h"

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
class RoundingBackend final : public testing::ForwardingBackend {
 public:
  using ForwardingBackend::ForwardingBackend;
  std::shared_ptr<const PolicySnapshot> snapshot(PolicyVersion version) override {
    return std::make_shared<const PolicySnapshot>(
        config(), std::make_unique<RoundedWeights>(parameters()), version);
  }
};

MakeTrainingBackend rounding_backend() {
  return [](TrainingWeights weights, const TrainerTable& table) {
    return std::make_unique<RoundingBackend>(make_cpu_training(std::move(weights), table));
  };
}

bool has_note(const std::vector<std::string>& notes, const std::string& part) {
  return std::ranges::any_of(
      notes, [&](const std::string& note) { return note.find(part) != std::string::npos; });
}

// Fails when a step is told, as where a disk is full.
class FailingProgress final : public Progress {
 public:
  explicit FailingProgress(int64_t failing) : failing_(failing) {}
  std::vector<std::string> notes;
  void note(const std::string& line) override { notes.push_back(line); }
  void begin_steps(int64_t) override {}
  void step(int64_t step, int64_t, const std::string&) override {
    if (step == failing_) throw Error("nowhere to write");
  }
  void count(const std::string&, const std::string&, size_t, size_t) override {}
  void evaluated(int64_t, const EvaluationResult&) override {}
  void status(const std::string&) override {}

 private:
  const int64_t failing_;
};

// What it writes has all digits, or it says that nothing is written.
TEST(RoundedRun, ThatGivesUpWritesNoRoundedWeightsAsItsLast) {
  for (const char* lag : {"0", "1"}) {
    const TestFolder folder;
    const Catalog catalog;
    RunSetup setup(tiny_config(
        catalog, folder / "run",
        {"checkpoint.every=1", std::string("orchestrator.max_off_policy_steps=") + lag}));
    setup.own_backend = rounding_backend();
    FailingProgress progress(3);
    const RunSummary summary = run_training(setup, catalog, {}, progress, [] { return false; });
    ASSERT_EQ(summary.end, RunSummary::End::gave_up);
    EXPECT_NE(summary.reason.find("nowhere to write"), std::string::npos) << summary.reason;
    EXPECT_EQ(summary.steps, 3);
    if (summary.weights.empty()) {
      EXPECT_TRUE(has_note(progress.notes, "the weights of step 3 are not written")) << lag;
      EXPECT_STREQ(lag, "1") << "no update goes on while a step is told";
      continue;
    }
    const Parameters last = load_parameters(summary.weights);
    EXPECT_FALSE(same_numbers(last, rounded(last))) << lag;
  }
}

TEST(RoundedRun, WhoseLastEvaluationFailsKeepsItsWeights) {
  const TestFolder folder;
  const Catalog catalog;
  RunSetup setup(tiny_config(catalog, folder / "run", {"eval.every=0", "checkpoint.every=3"}));
  setup.own_backend = rounding_backend();
  class LastEvaluationFails final : public Progress {
   public:
    void note(const std::string&) override {}
    void begin_steps(int64_t) override {}
    void step(int64_t, int64_t, const std::string&) override {}
    void count(const std::string&, const std::string&, size_t, size_t) override {}
    void evaluated(int64_t step, const EvaluationResult&) override {
      if (step == 6) throw Error("no memory for an engine");
    }
    void status(const std::string&) override {}
  } progress;
  const RunSummary summary = run_training(setup, catalog, {}, progress, [] { return false; });
  ASSERT_EQ(summary.end, RunSummary::End::gave_up) << summary.reason;
  ASSERT_FALSE(summary.weights.empty());
  EXPECT_TRUE(same_numbers(load_parameters(summary.weights),
                           load_parameters(folder / "run/checkpoints/step_6")));
}

TEST(RoundedRun, WritesTheLastWeightsWithAllDigits) {
  for (const char* lag : {"0", "1"}) {
    const TestFolder folder;
    const Catalog catalog;
    RunSetup setup(tiny_config(catalog, folder / "run",
                               {"output.weights_every=2", "checkpoint.every=3",
                                std::string("orchestrator.max_off_policy_steps=") + lag}));
    setup.own_backend = rounding_backend();
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
