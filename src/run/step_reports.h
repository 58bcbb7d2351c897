// What a run writes and reports for each of its steps.
#pragma once

#include <cstdint>

#include "orchestrator/advantage_program.h"
#include "orchestrator/loop.h"
#include "run/failure_lines.h"
#include "run/progress.h"
#include "run/run_files.h"
#include "run/run_setup.h"
#include "run/run_warnings.h"

namespace leeway {

class StepReports {
 public:
  // All of these must outlive this. `program` may be null.
  StepReports(const RunSetup& setup, RunFiles& files, Progress& progress, RunWarnings& warnings,
              AdvantageProgram* program);

  // Its line of metrics.jsonl and, as [output] says, its rollouts and its batch; failures, warnings
  // and its numbers as progress.
  void add(const StepRecord& record);
  // A line for a rollout that has failed, at most one a second; and, at the end, how many had none.
  void failed(const RolloutFailure& failure, double now);
  void end_failures();
  // What the run's programs wrote to their stderr since the last call, and what they warn of.
  void log_environments();

  // Of the steps that were added.
  double sampling_seconds() const { return sampling_; }
  double learning_seconds() const { return learning_; }
  int64_t trained_tokens() const { return trained_tokens_; }  // in all; those before a resume too

 private:
  void log_failures(const StepRecord& record);
  void tell_drops(const StepRecord& record);
  void tell_numbers(const StepRecord& record);
  void note_all(const std::vector<std::string>& lines);

  const RunSetup& setup_;
  const RunConfig& run_;
  RunFiles& files_;
  Progress& progress_;
  RunWarnings& warnings_;
  AdvantageProgram* program_;
  FailureLines failure_lines_;
  double sampling_ = 0.0, learning_ = 0.0;
  int64_t trained_tokens_ = 0;
  int64_t failed_ = 0;  // rollouts
  bool told_drops_ = false;
};

}  // namespace leeway
