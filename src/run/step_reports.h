// What a run writes and reports for each of its steps.
#pragma once

#include <cstdint>

#include "orchestrator/loop.h"
#include "run/progress.h"
#include "run/run_files.h"
#include "run/run_setup.h"
#include "run/run_warnings.h"

namespace leeway {

class StepReports {
 public:
  // All of these must outlive this.
  StepReports(const RunSetup& setup, RunFiles& files, Progress& progress, RunWarnings& warnings);

  // Its line of metrics.jsonl and, as [output] says, its rollouts and its batch; failures, warnings
  // and its numbers as progress.
  void add(const StepRecord& record);
  // What programs of environments wrote to their stderr since the last call, and what they warn of.
  void log_environments();

  // Of the steps that were added.
  double sampling_seconds() const { return sampling_; }
  double learning_seconds() const { return learning_; }
  int64_t trained_tokens() const { return trained_tokens_; }  // in all; those before a resume too

 private:
  void tell_failures(const StepRecord& record);
  void tell_numbers(const StepRecord& record);
  void note_all(const std::vector<std::string>& lines);

  const RunSetup& setup_;
  const RunConfig& run_;
  RunFiles& files_;
  Progress& progress_;
  RunWarnings& warnings_;
  double sampling_ = 0.0, learning_ = 0.0;
  int64_t trained_tokens_ = 0;
  int64_t failed_ = 0;  // rollouts
  bool told_failures_ = false;
};

}  // namespace leeway
