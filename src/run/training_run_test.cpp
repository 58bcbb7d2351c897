// Whole runs in this process: no program is started.

#include "run/training_run.h"

#include <gtest/gtest.h>

#include "run/run_start.h"
#include "run/test_support.h"

namespace leeway {
namespace {

std::string weights_of(const RunSummary& summary) {
  return read_file(summary.weights + "/model.safetensors");
}

RunSummary train(const Config& config, Progress& progress, const StopCondition& should_stop) {
  const Catalog catalog;
  RunSetup setup(config);
  return run_training(setup, catalog, {}, progress, should_stop);
}

bool never() { return false; }

TEST(TrainingRun, EndsWithASummaryAndTellsEveryStep) {
  const TestFolder folder;
  const Catalog catalog;
  RecordingProgress progress;
  const RunSummary summary = train(tiny_config(catalog, folder / "run"), progress, never);
  EXPECT_EQ(summary.end, RunSummary::End::finished) << summary.reason;
  EXPECT_EQ(summary.steps, 6);
  EXPECT_EQ(progress.events,
            (std::vector<std::string>{"eval 0", "step 1", "step 2", "eval 2", "step 3", "step 4",
                                      "eval 4", "step 5", "step 6", "eval 6"}));
  EXPECT_EQ(steps_in(folder / "run/metrics.jsonl"), (std::vector<int64_t>{1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(steps_in(folder / "run/eval.jsonl"), (std::vector<int64_t>{0, 2, 4, 6}));
  EXPECT_FALSE(summary.before.empty());
  EXPECT_FALSE(summary.after.empty());
  EXPECT_FALSE(weights_of(summary).empty());
}

TEST(TrainingRun, ThatIsStoppedAndResumedHasTheWeightsOfOneThatIsNot) {
  const TestFolder folder;
  const Catalog catalog;
  RecordingProgress whole_progress;
  const RunSummary whole = train(tiny_config(catalog, folder / "whole"), whole_progress, never);
  ASSERT_EQ(whole.end, RunSummary::End::finished) << whole.reason;
  for (const int64_t stop_after : {1, 2, 3}) {
    const std::string run = folder / ("run_" + std::to_string(stop_after));
    RecordingProgress progress;
    const RunSummary first = train(tiny_config(catalog, run), progress,
                                   [&] { return progress.last_step >= stop_after; });
    ASSERT_EQ(first.end, RunSummary::End::stopped) << first.reason;
    ASSERT_GE(first.steps, stop_after);
    ASSERT_LT(first.steps, 6);
    RecordingProgress resumed;
    const ResumedSummary second = resume_run(catalog, run, {}, resumed, never);
    const auto& summary = std::get<RunSummary>(second);
    EXPECT_EQ(summary.end, RunSummary::End::finished) << summary.reason;
    EXPECT_EQ(summary.steps, 6);
    EXPECT_TRUE(weights_of(summary) == weights_of(whole)) << "stopped after " << stop_after;
    EXPECT_EQ(steps_in(run + "/metrics.jsonl"), (std::vector<int64_t>{1, 2, 3, 4, 5, 6}));
    EXPECT_EQ(steps_in(run + "/eval.jsonl"), (std::vector<int64_t>{0, 2, 4, 6}));
    // There is nothing left to do.
    RecordingProgress idle;
    const ResumedSummary third = resume_run(catalog, run, {}, idle, never);
    EXPECT_TRUE(std::get<RunSummary>(third).finished_before);
    EXPECT_TRUE(idle.events.empty());
  }
}

TEST(TrainingRun, RefusesWhatCannotBeTrainedOnBeforeAnythingIsWritten) {
  const TestFolder folder;
  const Catalog catalog;
  RecordingProgress progress;
  bool asked = false;
  EXPECT_THROW(train(tiny_config(catalog, folder / "run", {"rollout.temperature=0"}), progress,
                     [&] { return asked = true; }),
               Error);
  EXPECT_FALSE(is_present(folder / "run"));
  EXPECT_FALSE(asked) << "a stop is the run's to handle once its folder is there";
}

}  // namespace
}  // namespace leeway
