// A run's progress, kept in its log.txt as well.
#pragma once

#include <chrono>

#include "run/progress.h"
#include "run/run_files.h"
#include "run/step_line.h"

namespace leeway {

// Passes everything on to `next`. Notes, evaluations and, at most every two seconds, steps are
// written to the log of `files`. Both must outlive this. `note` and `evaluated` throw Error where
// the log cannot be written.
class LoggedProgress final : public Progress {
 public:
  LoggedProgress(Progress& next, RunFiles& files) : next_(next), files_(files) {}

  void note(const std::string& line) override;
  void begin_steps(int64_t done) override;
  void step(int64_t step, int64_t total, const std::string& text) override;
  void count(const std::string& what, const std::string& unit, size_t done, size_t total) override;
  void evaluated(int64_t step, const EvaluationResult& result) override;
  void status(const std::string& line) override;

 private:
  Progress& next_;
  RunFiles& files_;
  StepLine line_;
  std::chrono::steady_clock::time_point last_{};
};

}  // namespace leeway
