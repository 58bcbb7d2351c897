// Evaluations of a run: beside the loop or in its way, and what becomes of them when a run ends.

#include "run/run_evaluations.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>

#include "run/run_saving.h"
#include "run/run_start.h"
#include "run/test_support.h"
#include "run/training_run.h"

namespace leeway {
namespace {

bool never() { return false; }
bool open() { return true; }

size_t place_of(const RecordingProgress& progress, const std::string& event) {
  const auto& events = progress.events;
  return static_cast<size_t>(std::find(events.begin(), events.end(), event) - events.begin());
}

std::vector<std::string> free_schedule(std::vector<std::string> sets = {}) {
  sets.push_back("orchestrator.schedule=free");
  return sets;
}

// Evaluations that can end only after later steps would never end if the loop waited for them.
TEST(RunEvaluations, RunBesideTheLoopInAFreeSchedule) {
  const TestFolder folder;
  const Catalog catalog;
  RecordingProgress progress;
  std::atomic<bool> late = false;
  const auto begin = std::chrono::steady_clock::now();
  // The evaluation of step 0 waits for step 1, that of step 2 for step 3, and so on.
  const auto gate = [&] {
    if (std::chrono::steady_clock::now() - begin > std::chrono::seconds(60)) late = true;
    const int64_t last = progress.last_evaluated;
    return late || progress.last_step >= std::min<int64_t>(6, last < 0 ? 1 : last + 3);
  };
  RunSetup setup = gated_setup(tiny_config(catalog, folder / "run", free_schedule()), gate);
  const RunSummary summary = run_training(setup, catalog, {}, progress, never);
  EXPECT_EQ(summary.end, RunSummary::End::finished) << summary.reason;
  EXPECT_FALSE(late) << "an evaluation kept the loop waiting";
  EXPECT_LT(place_of(progress, "step 1"), place_of(progress, "eval 0"));
  EXPECT_LT(place_of(progress, "step 3"), place_of(progress, "eval 2"));
  EXPECT_EQ(steps_in(folder / "run/eval.jsonl"), (std::vector<int64_t>{0, 2, 4, 6}));
  EXPECT_FALSE(summary.before.empty());
  EXPECT_FALSE(summary.after.empty());
}

TEST(RunEvaluations, AreWaitedForInLockstep) {
  const TestFolder folder;
  const Catalog catalog;
  RecordingProgress progress;
  RunSetup setup = gated_setup(tiny_config(catalog, folder / "run"), open);
  const RunSummary summary = run_training(setup, catalog, {}, progress, never);
  EXPECT_EQ(summary.end, RunSummary::End::finished) << summary.reason;
  EXPECT_EQ(progress.events,
            (std::vector<std::string>{"eval 0", "step 1", "step 2", "eval 2", "step 3", "step 4",
                                      "eval 4", "step 5", "step 6", "eval 6"}));
}

// The evaluation of step 2 is under way when the run is stopped at a later step.
TEST(RunEvaluations, ThatAStopCutShortAreMadeWhenTheRunGoesOn) {
  const TestFolder folder;
  const Catalog catalog;
  const Config config = tiny_config(catalog, folder / "run", free_schedule());
  {
    RecordingProgress progress;
    RunSetup setup = gated_setup(config, [&] { return progress.last_evaluated < 0; });
    const RunSummary summary =
        run_training(setup, catalog, {}, progress, [&] { return progress.last_step >= 3; });
    ASSERT_EQ(summary.end, RunSummary::End::stopped) << summary.reason;
    ASSERT_GT(summary.steps, 2);
    EXPECT_LT(place_of(progress, "stopped eval 2"), progress.events.size());
    EXPECT_EQ(steps_in(folder / "run/eval.jsonl"), (std::vector<int64_t>{0}));
    EXPECT_TRUE(is_present(folder / "run/weights/step_2/config.json"));
  }
  RecordingProgress progress;
  const RunSetup setup = gated_setup(config, open);
  Resumption resumption =
      look_at_run(folder / "run", [&](const Checkpoint& each) { check_checkpoint(setup, each); });
  const RunSummary summary =
      resume_training(setup, catalog, std::move(resumption), progress, never);
  EXPECT_EQ(summary.end, RunSummary::End::finished) << summary.reason;
  EXPECT_EQ(steps_in(folder / "run/eval.jsonl"), (std::vector<int64_t>{0, 2, 4, 6}));
}

// A checkpoint of a later step must not be there without the evaluation: a run that is killed then
// could not make it again.
TEST(RunEvaluations, OfEarlierStepsAreWrittenBeforeACheckpoint) {
  const TestFolder folder;
  const Catalog catalog;
  RecordingProgress progress;
  RunSetup setup = gated_setup(
      tiny_config(catalog, folder / "run", free_schedule({"checkpoint.every=1", "eval.every=1"})),
      open);
  bool missing = false;
  const StopCondition look = [&] {
    const std::vector<int64_t> steps = steps_in(folder / "run/eval.jsonl");
    const int64_t written = steps.empty() ? -1 : steps.back();
    for (int64_t step = 1; step <= 6; ++step) {
      const std::string checkpoint = folder / ("run/checkpoints/step_" + std::to_string(step));
      if (is_present(checkpoint) && written < step - 1) missing = true;
    }
    return false;
  };
  const RunSummary summary = run_training(setup, catalog, {}, progress, look);
  EXPECT_EQ(summary.end, RunSummary::End::finished) << summary.reason;
  EXPECT_FALSE(missing);
  EXPECT_EQ(steps_in(folder / "run/eval.jsonl"), (std::vector<int64_t>{0, 1, 2, 3, 4, 5, 6}));
}

TEST(RunEvaluations, ThatCannotBeMadeEndTheRunInBothSchedules) {
  const TestFolder folder;
  const Catalog catalog;
  for (const char* schedule : {"free", "lockstep"}) {
    RecordingProgress progress;
    RunSetup setup = gated_setup(
        tiny_config(catalog, folder / schedule, {std::string("orchestrator.schedule=") + schedule}),
        open, true);
    const RunSummary summary = run_training(setup, catalog, {}, progress, never);
    EXPECT_EQ(summary.end, RunSummary::End::gave_up);
    EXPECT_NE(summary.reason.find("the held-out examples are gone"), std::string::npos)
        << summary.reason;
  }
}

TEST(RunEvaluations, ThatAreUnderWayWhenARunGivesUpAreWritten) {
  const TestFolder folder;
  const Catalog catalog;
  RecordingProgress progress;
  std::atomic<bool> gave_up = false;
  const auto begin = std::chrono::steady_clock::now();
  RunSetup setup = gated_setup(tiny_config(catalog, folder / "run", free_schedule()), [&] {
    return gave_up || std::chrono::steady_clock::now() - begin > std::chrono::seconds(60);
  });
  // The stop condition is the run's own code to call: what it throws ends the loop.
  const StopCondition fail = [&] {
    if (progress.last_step < 1 || gave_up) return false;
    gave_up = true;
    throw Error("nothing goes any more");
  };
  const RunSummary summary = run_training(setup, catalog, {}, progress, fail);
  EXPECT_EQ(summary.end, RunSummary::End::gave_up);
  EXPECT_EQ(summary.reason, "nothing goes any more");
  EXPECT_EQ(steps_in(folder / "run/eval.jsonl"), (std::vector<int64_t>{0}));
}

// Names and values in text, so that numbers that are not there compare equal; without times.
std::vector<std::string> lines_of(const EvaluationResult& result) {
  std::vector<std::string> lines;
  for (const auto& [name, value] : result.metrics) {
    if (!name.starts_with("time/")) lines.push_back(name + " " + std::to_string(value));
  }
  return lines;
}

TEST(PolicyEvaluation, WithOneEngineForAllWeightsFindsWhatNewEnginesFind) {
  const TestFolder folder;
  const Catalog catalog;
  const RunSetup setup(tiny_config(catalog, folder / "run", {"eval.prompts=16"}));
  const auto first = std::make_shared<const PolicySnapshot>(setup.weights, 0);
  Parameters changed = setup.weights;
  initialise(changed, 12345);
  const auto second = std::make_shared<const PolicySnapshot>(std::move(changed), 1);
  const EvalTable& table = setup.config.run.eval;
  PolicyEvaluator evaluator(setup);
  const auto found = [&](PolicyEvaluator& with,
                         const std::shared_ptr<const PolicySnapshot>& weights) {
    const EvaluationResult result = with.evaluate(weights, table);
    return std::pair(result.tokens, lines_of(result));
  };
  const auto of_first = found(evaluator, first);
  // One that is stopped leaves nothing behind.
  EvaluationEvents stop;
  stop.should_stop = [] { return true; };
  EXPECT_TRUE(evaluator.evaluate(second, table, stop).stopped);
  const auto of_second = found(evaluator, second);
  EXPECT_EQ(found(evaluator, first), of_first);
  PolicyEvaluator fresh(setup);
  EXPECT_EQ(found(fresh, second), of_second);
  EXPECT_NE(of_first, of_second);
}

}  // namespace
}  // namespace leeway
