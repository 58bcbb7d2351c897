// Whole runs in this process: no program is started.

#include "run/training_run.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "base/utf8.h"
#include "config/given.h"
#include "orchestrator/process_test_support.h"
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
  EXPECT_NE(summary_text(summary).find("rollouts in "), std::string::npos);
  EXPECT_NE(summary_text(summary).find("s: sft 0 s, rl "), std::string::npos)
      << summary_text(summary);
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
    ASSERT_TRUE(summary.resumed);
    const std::string text = summary_text(summary);
    const std::string since = fmt::format(
        "6 of 6 steps, {} rollouts; since the resume {} steps, {} rollouts in ", summary.rollouts,
        6 - first.steps, summary.rollouts - summary.resumed->rollouts);
    EXPECT_NE(text.find(since), std::string::npos) << text;
    EXPECT_EQ(text.find("sft"), std::string::npos) << text;
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

TEST(TrainingRun, ThatGoesOnIsComparedWithItsFirstStepAndNotWithTheNextOne) {
  const TestFolder folder;
  const Catalog catalog;
  const std::string run = folder / "run";
  RecordingProgress progress;
  const RunSummary first = train(tiny_config(catalog, run, {"trainer.loss.preset=icepop"}),
                                 progress, [&] { return progress.last_step >= 2; });
  ASSERT_EQ(first.end, RunSummary::End::stopped) << first.reason;
  // As if nearly everything had been kept in the first step, and more is masked since.
  std::string rows = read_file(run + "/metrics.jsonl");
  const std::string key = "\"is_masked\":";
  const size_t at = rows.find(key);
  ASSERT_LT(at, rows.find('\n')) << rows.substr(0, 400);
  const size_t begin = at + key.size();
  rows.replace(begin, rows.find_first_of(",}", begin) - begin, " -1");
  write_file_atomically(run + "/metrics.jsonl", rows);
  RecordingProgress resumed;
  EXPECT_EQ(std::get<RunSummary>(resume_run(catalog, run, {}, resumed, never)).steps, 6);
  EXPECT_TRUE(std::ranges::any_of(resumed.notes, [](const std::string& note) {
    return note.find("up from -100 % in the first step") != std::string::npos;
  }));
}

TEST(TrainingRun, WhosePageCannotBeWrittenNamesNone) {
  const TestFolder folder;
  const Catalog catalog;
  FolderInTheWay progress(folder / "run/report.html");
  const RunSummary summary = train(tiny_config(catalog, folder / "run"), progress, never);
  EXPECT_EQ(summary.end, RunSummary::End::gave_up);
  EXPECT_EQ(summary.report, "");
  EXPECT_EQ(summary_text(summary).find("report "), std::string::npos) << summary_text(summary);
  RecordingProgress other;
  const RunSummary good = train(tiny_config(catalog, folder / "good"), other, never);
  EXPECT_EQ(good.report, folder / "good/report.html");
  EXPECT_TRUE(is_present(good.report));
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

// The example program of docs/environments.md.
const std::string kProgram = "python3 " LEEWAY_SOURCE_DIR "/examples/04_process/advantages.py";

TEST(TrainingRun, WithAProgramForAdvantagesRepeatsAndResumesBitForBit) {
  const TestFolder folder;
  const Catalog catalog;
  const std::vector<std::string> sets = {"orchestrator.advantage_command=" + kProgram,
                                         "output.rollouts_every=1", "output.rollouts_groups=0"};
  RecordingProgress progress;
  const RunSummary first = train(tiny_config(catalog, folder / "first", sets), progress, never);
  ASSERT_EQ(first.end, RunSummary::End::finished) << first.reason;
  RecordingProgress again;
  const RunSummary second = train(tiny_config(catalog, folder / "second", sets), again, never);
  EXPECT_TRUE(weights_of(first) == weights_of(second));
  RecordingProgress stopped;
  const RunSummary part = train(tiny_config(catalog, folder / "third", sets), stopped,
                                [&] { return stopped.last_step >= 2; });
  ASSERT_EQ(part.end, RunSummary::End::stopped) << part.reason;
  RecordingProgress resumed;
  const ResumedSummary rest = resume_run(catalog, folder / "third", {}, resumed, never);
  EXPECT_TRUE(weights_of(std::get<RunSummary>(rest)) == weights_of(first));
  for (int step = 1; step <= 6; ++step) {
    const std::string name = "/rollouts/step_" + std::to_string(step) + ".jsonl";
    EXPECT_EQ(read_file(folder / ("first" + name)), read_file(folder / ("third" + name)));
  }
}

TEST(TrainingRun, WhoseProgramForAdvantagesFailsGivesUpWithItsLastWords) {
  const TestFolder folder;
  const Catalog catalog;
  // Works for the first two steps of two groups each.
  const std::string program =
      testing::answering("n=$((n+1)); if [ $n -gt 4 ]; then echo out of ideas >&2; " +
                         testing::answer(R"("error": "no more")") + "; else " +
                         testing::answer(R"("advantages": [1, -1, 0, 0])") + "; fi");
  RecordingProgress progress;
  const RunSummary summary =
      train(tiny_config(catalog, folder / "run",
                        {"orchestrator.advantage_command=" + toml_string(program),
                         "orchestrator.retry_backoff=0.01", "checkpoint.every=1"}),
            progress, never);
  EXPECT_EQ(summary.end, RunSummary::End::gave_up);
  EXPECT_EQ(summary.steps, 2);
  for (const char* words : {"step 3: orchestrator.advantage_command", "asked 3 times",
                            "the program reports: no more"}) {
    EXPECT_NE(summary.reason.find(words), std::string::npos) << summary.reason;
  }
  EXPECT_EQ(steps_in(folder / "run/metrics.jsonl"), (std::vector<int64_t>{1, 2}));
  EXPECT_FALSE(weights_of(summary).empty()) << "what was learned is kept";
  EXPECT_NE(read_file(folder / "run/log.txt").find("out of ideas"), std::string::npos);
}

TEST(TrainingRun, RefusesAProgramForAdvantagesThatDoesNotStart) {
  const TestFolder folder;
  const Catalog catalog;
  RecordingProgress progress;
  EXPECT_THROW(train(tiny_config(catalog, folder / "run",
                                 {"orchestrator.advantage_command=/does/not/exist"}),
                     progress, never),
               Error);
  EXPECT_FALSE(is_present(folder / "run"));
}

TEST(TrainingRun, TellsWhichGroupsAProgramLeftOut) {
  const TestFolder folder;
  const Catalog catalog;
  RecordingProgress progress;
  const RunSummary summary = train(
      tiny_config(catalog, folder / "run",
                  {"trainer.max_steps=2", "output.rollouts_every=1",
                   "orchestrator.advantage_command=" +
                       toml_string(testing::answering(testing::answer(R"("drop": "too easy")")))}),
      progress, never);
  ASSERT_EQ(summary.end, RunSummary::End::finished) << summary.reason;
  EXPECT_EQ(summary.totals.filtered, 16);
  const auto told = std::count_if(progress.notes.begin(), progress.notes.end(), [](const auto& n) {
    return n.find("left 2 of 2 groups out of the update: too ") != std::string::npos;
  });
  EXPECT_EQ(told, 1) << "the first step; later ones are in the log";
  const std::string log = read_file(folder / "run/log.txt");
  EXPECT_NE(log.find("step 2: orchestrator.advantage_command left 2 of 2"), std::string::npos);
  const std::string rollouts = read_file(folder / "run/rollouts/step_1.jsonl");
  EXPECT_NE(rollouts.find("\"dropped\": \"too "), std::string::npos);
  EXPECT_EQ(valid_utf8_prefix(rollouts), rollouts.size());
}

}  // namespace
}  // namespace leeway
