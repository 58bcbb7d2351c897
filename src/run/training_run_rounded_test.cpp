// A run whose trainer has no room for snapshots with all digits, as on a GPU that a large model
// fills: it samples and evaluates with rounded ones, and writes its last weights as they are.

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>

#include "base/files.h"
#include "base/half.h"
#include "config/given.h"
#include "leeway/error.h"
#include "model/adapter_io.h"
#include "run/from_run.h"
#include "run/policy_card.h"
#include "run/run_files.h"
#include "run/run_start.h"
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
class RoundingBackend : public testing::ForwardingBackend {
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

Config config_of(const Catalog& catalog, const std::string& output, const char* lag,
                 std::vector<std::string> sets) {
  sets.push_back(std::string("orchestrator.max_off_policy_steps=") + lag);
  return tiny_config(catalog, output, std::move(sets));
}

// Where in its update a backend fails, after three that went well.
enum class Fails { before_its_step, after_its_step, with_all_of_the_device };

class FailingBackend final : public RoundingBackend {
 public:
  FailingBackend(std::unique_ptr<TrainingBackend> inner, Fails fails)
      : RoundingBackend(std::move(inner)), fails_(fails) {}
  std::vector<SlotResult> run_slots(const PackedBatch& batch, std::span<const GradientSlot> slots,
                                    const SlotPass& pass, std::span<const float> g) override {
    if (fails_ != Fails::after_its_step && steps() == 3) {
      is_lost_ = fails_ == Fails::with_all_of_the_device;
      throw Error("no memory for a pass");
    }
    return RoundingBackend::run_slots(batch, slots, pass, g);
  }
  const Parameters& parameters() override {
    if (is_lost_) throw Error("the device does not answer");
    return RoundingBackend::parameters();
  }
  std::shared_ptr<const PolicySnapshot> snapshot(PolicyVersion version) override {
    if (fails_ == Fails::after_its_step && steps() == 4) throw Error("no memory for a copy");
    return RoundingBackend::snapshot(version);
  }

 private:
  const Fails fails_;
  bool is_lost_ = false;
};

RunSummary run_that_fails(const TestFolder& folder, const char* lag, const char* every, Fails fails,
                          RecordingProgress& progress) {
  const Catalog catalog;
  RunSetup setup(config_of(catalog, folder / "run", lag,
                           {"eval.every=0", std::string("checkpoint.every=") + every}));
  setup.own_backend = [fails](TrainingWeights weights, const TrainerTable& table) {
    return std::make_unique<FailingBackend>(make_cpu_training(std::move(weights), table), fails);
  };
  return run_training(setup, catalog, {}, progress, [] { return false; });
}

TEST(RoundedRun, WhoseUpdateFailsBeforeItChangesTheWeightsWritesThemWithAllDigits) {
  for (const char* lag : {"0", "1"}) {
    const TestFolder folder;
    RecordingProgress progress;
    const RunSummary summary = run_that_fails(folder, lag, "3", Fails::before_its_step, progress);
    ASSERT_EQ(summary.end, RunSummary::End::gave_up);
    EXPECT_NE(summary.reason.find("no memory for a pass"), std::string::npos) << summary.reason;
    EXPECT_EQ(summary.steps, 3);
    ASSERT_FALSE(summary.weights.empty()) << lag;
    EXPECT_TRUE(same_numbers(load_parameters(summary.weights),
                             load_parameters(folder / "run/checkpoints/step_3")));
    EXPECT_FALSE(has_note(progress.notes, "are not written"));
  }
}

TEST(RoundedRun, WhoseUpdateFailsAfterItChangedTheWeightsSaysThatTheLastAreLost) {
  for (const char* lag : {"0", "1"}) {
    for (const char* every : {"0", "2"}) {
      const TestFolder folder;
      RecordingProgress progress;
      const RunSummary summary =
          run_that_fails(folder, lag, every, Fails::after_its_step, progress);
      ASSERT_EQ(summary.end, RunSummary::End::gave_up);
      EXPECT_NE(summary.reason.find("no memory for a copy"), std::string::npos) << summary.reason;
      EXPECT_EQ(summary.steps, 3);
      EXPECT_EQ(summary.weights, "");
      EXPECT_FALSE(is_present(folder / "run/weights/step_3"));
      EXPECT_TRUE(has_note(progress.notes, "the weights of step 3 are not written"));
      const bool checkpoint = every[0] != '0';
      EXPECT_EQ(has_note(progress.notes, "--resume goes on from the last checkpoint"), checkpoint);
      EXPECT_EQ(has_note(progress.notes, "there is no checkpoint either"), !checkpoint);
    }
  }
}

TEST(RoundedRun, WhoseDeviceIsLostSaysThatTheLastWeightsAreNotWrittenAndWhy) {
  for (const char* every : {"0", "2"}) {
    const TestFolder folder;
    RecordingProgress progress;
    const RunSummary summary =
        run_that_fails(folder, "1", every, Fails::with_all_of_the_device, progress);
    ASSERT_EQ(summary.end, RunSummary::End::gave_up);
    EXPECT_NE(summary.reason.find("no memory for a pass"), std::string::npos) << summary.reason;
    EXPECT_EQ(summary.weights, "");
    EXPECT_TRUE(has_note(progress.notes, "of step 3 are not written as the last ones: the device"));
    EXPECT_EQ(has_note(progress.notes, "--resume goes on from the last checkpoint"),
              every[0] != '0');
  }
}

class NothingToldOfStep3 final : public RecordingProgress {
  void step(int64_t step, int64_t, const std::string&) override {
    if (step == 3) throw Error("nowhere to write");
  }
};

// The update that goes on beside such a step ends, and the trainer alone has its weights.
TEST(RoundedRun, WhoseStepCannotBeToldWritesTheWeightsThatTheTrainerHas) {
  for (const char* lag : {"0", "1"}) {
    const TestFolder folder;
    const Catalog catalog;
    RunSetup setup(config_of(catalog, folder / "run", lag,
                             {"checkpoint.every=0", "eval.every=0", "output.weights_every=0"}));
    setup.own_backend = rounding_backend();
    NothingToldOfStep3 progress;
    const RunSummary summary = run_training(setup, catalog, {}, progress, [] { return false; });
    ASSERT_EQ(summary.end, RunSummary::End::gave_up);
    EXPECT_EQ(summary.steps, 3);
    // With a lag the next batch may be there before the step is told, or not.
    const bool is_next = summary.weights == weights_folder(setup.config.run.output_dir, 4);
    EXPECT_TRUE(is_next || summary.weights == weights_folder(setup.config.run.output_dir, 3))
        << summary.weights;
    EXPECT_FALSE(is_next && lag[0] == '0') << "sampling waits for the step";
    EXPECT_EQ(has_note(progress.notes, "are of step 4, which was trained when the run ended"),
              is_next);
    const Parameters last = load_parameters(summary.weights);
    EXPECT_FALSE(same_numbers(last, rounded(last))) << lag;
  }
}

// As where a disk is full: the loop ends, with an update beside it or without.
TEST(RoundedRun, WhoseStepCannotBeToldWritesNoRoundedWeightsAsItsLast) {
  for (const char* lag : {"0", "1"}) {
    const TestFolder folder;
    const Catalog catalog;
    RunSetup setup(config_of(catalog, folder / "run", lag, {"checkpoint.every=3"}));
    setup.own_backend = rounding_backend();
    NothingToldOfStep3 progress;
    const RunSummary summary = run_training(setup, catalog, {}, progress, [] { return false; });
    ASSERT_EQ(summary.end, RunSummary::End::gave_up);
    EXPECT_NE(summary.reason.find("nowhere to write"), std::string::npos) << summary.reason;
    EXPECT_EQ(summary.steps, 3);
    ASSERT_FALSE(summary.weights.empty()) << "a step with a checkpoint is told before the next";
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
    RunSetup setup(
        config_of(catalog, folder / "run", lag, {"output.weights_every=2", "checkpoint.every=3"}));
    setup.own_backend = rounding_backend();
    bool early = false;  // whether those of the last step are there before its evaluation ends
    class Watching final : public RecordingProgress {
     public:
      Watching(std::string name, bool& early) : name_(std::move(name)), early_(early) {}
      void evaluated(int64_t step, const EvaluationResult& result) override {
        early_ |= is_present(name_);
        RecordingProgress::evaluated(step, result);
      }

     private:
      const std::string name_;
      bool& early_;
    } progress(folder / "run/weights/step_6", early);
    const RunSummary summary = run_training(setup, catalog, {}, progress, [] { return false; });
    ASSERT_EQ(summary.end, RunSummary::End::finished) << summary.reason;
    EXPECT_EQ(summary.steps, 6);
    EXPECT_EQ(progress.last_evaluated, 6);
    EXPECT_FALSE(early) << "rounded ones would stay after a kill";

    const Parameters last = load_parameters(summary.weights);
    EXPECT_TRUE(same_numbers(last, load_parameters(folder / "run/checkpoints/step_6")));
    EXPECT_FALSE(same_numbers(last, rounded(last))) << "bf16 has fewer digits";
    EXPECT_FALSE(read_policy_card(summary.weights)->rounded);
    const Parameters two = load_parameters(folder / "run/weights/step_2");
    EXPECT_TRUE(same_numbers(two, rounded(two)));
    EXPECT_TRUE(read_policy_card(folder / "run/weights/step_2")->rounded);
    EXPECT_EQ(std::ranges::count_if(progress.notes,
                                    [](const std::string& note) {
                                      return note.find("rounded to bf16") != std::string::npos;
                                    }),
              1);
  }
}

TEST(RoundedRun, SaysNothingOfRoundingThatChangesNoNumber) {
  const TestFolder folder;
  const Catalog catalog;
  RunSetup setup(config_of(catalog, folder / "run", "0", {"rollout.precision=bf16"}));
  setup.own_backend = rounding_backend();
  RecordingProgress progress;
  const RunSummary summary = run_training(setup, catalog, {}, progress, [] { return false; });
  ASSERT_EQ(summary.end, RunSummary::End::finished) << summary.reason;
  EXPECT_FALSE(has_note(progress.notes, "rounded"));
}

TEST(RoundedRun, KeepsTheReferenceAndIsResumedWithAllDigits) {
  const TestFolder folder;
  const Catalog catalog;
  const std::string run = folder / "run";
  RunSetup setup(config_of(catalog, run, "1",
                           {"trainer.loss.preset=grpo", "trainer.loss.ref_kl=0.01",
                            "trainer.reference=initial", "checkpoint.every=2"}));
  setup.own_backend = rounding_backend();
  RecordingProgress progress;
  const RunSummary first =
      run_training(setup, catalog, {}, progress, [&] { return progress.last_step >= 3; });
  ASSERT_EQ(first.end, RunSummary::End::stopped) << first.reason;
  EXPECT_TRUE(same_numbers(load_parameters(run + "/weights/step_0"), setup.weights));
  const Parameters at_stop = load_parameters(first.weights);
  EXPECT_FALSE(same_numbers(at_stop, rounded(at_stop)));
  RecordingProgress resumed;
  const ResumedSummary second = resume_run(catalog, run, {}, resumed, [] { return false; });
  const auto& summary = std::get<RunSummary>(second);
  EXPECT_EQ(summary.end, RunSummary::End::finished) << summary.reason;
  EXPECT_EQ(summary.steps, 6);
}

// A run that is killed leaves what was written beside training.
TEST(RoundedRun, IsStartedFromWithAllDigitsWhereTheyAre) {
  const TestFolder folder;
  const Catalog catalog;
  const std::string run = folder / "run";
  RunSetup setup(config_of(
      catalog, run, "0",
      {"output.weights_every=1", "checkpoint.every=2", "eval.every=0", "checkpoint.keep_last=9"}));
  setup.own_backend = rounding_backend();
  RecordingProgress progress;
  ASSERT_EQ(run_training(setup, catalog, {}, progress, [] { return false; }).end,
            RunSummary::End::finished);
  const auto lose = [&](const std::string& part) { std::filesystem::remove_all(run + "/" + part); };
  for (const char* part : {"weights/step_6", "checkpoints/step_6", "weights/step_5"}) lose(part);
  const RunOrigin same_step = origin_of(run, false);
  EXPECT_EQ(same_step.weights, run + "/checkpoints/step_4");
  EXPECT_FALSE(same_step.rounded);
  lose("checkpoints/step_4");
  const RunOrigin later = origin_of(run, false);
  EXPECT_EQ(later.weights, run + "/weights/step_4");
  EXPECT_TRUE(later.rounded);
  std::vector<std::string> notes;
  config_from(catalog, later, "", {"output_dir=" + (folder / "next")}, {}, notes);
  EXPECT_TRUE(has_note(notes, "rounded to bf16"));
  EXPECT_FALSE(origin_of(run, true).rounded) << "with the optimizer's moments";

  // What a card says does not matter where a later checkpoint is there.
  for (const char* part : {"weights/step_4", "weights/step_3", "weights/step_2"}) lose(part);
  write_file_atomically(run + "/weights/step_1/leeway.json", "{");
  EXPECT_EQ(origin_of(run, false).weights, run + "/checkpoints/step_2");
}

// A kill, a full disk: whatever stops the writing, there are no rounded weights that do not say so.
TEST(RoundedRun, WhoseWeightsCannotBeLabelledWritesNone) {
  const TestFolder folder;
  const Catalog catalog;
  RunSetup setup(config_of(catalog, folder / "run", "0",
                           {"output.weights_every=2", "checkpoint.every=0", "eval.every=0"}));
  setup.own_backend = rounding_backend();
  FolderInTheWay progress(folder / "run/weights/step_2/leeway.json");
  run_training(setup, catalog, {}, progress, [] { return false; });
  EXPECT_FALSE(is_complete_folder(folder / "run/weights/step_2"));
  EXPECT_TRUE(is_complete_folder(folder / "run/weights/step_4"));
}

// The last weights take the place of rounded ones of the same step, and their writing is stopped.
TEST(RoundedWeights, SayThatTheyAreUntilFullOnesHaveTakenTheirPlace) {
  const TestFolder folder;
  const Catalog catalog;
  const RunSetup setup(tiny_config(catalog, folder / "run", {}));
  const RunFiles files(claim_folder(folder / "run"));
  const std::string to = files.save_weights(rounded(setup.weights), 2, setup, /*rounded=*/true);
  const auto says_rounded = [&] { return read_policy_card(to).value_or(PolicyCard{}).rounded; };
  ASSERT_TRUE(says_rounded());
  std::filesystem::rename(to + "/model.safetensors", folder / "aside");
  std::filesystem::create_directories(to + "/model.safetensors/is a folder");
  EXPECT_THROW(files.save_weights(setup.weights, 2, setup), Error);
  EXPECT_TRUE(says_rounded());

  std::filesystem::remove_all(to + "/model.safetensors");
  std::filesystem::rename(folder / "aside", to + "/model.safetensors");
  files.save_weights(setup.weights, 2, setup);
  EXPECT_FALSE(says_rounded());
  EXPECT_TRUE(same_numbers(load_parameters(to), setup.weights));
}

}  // namespace
}  // namespace leeway
