// Draws progress on stderr; the only place that does.
#pragma once

#include <chrono>
#include <string>

#include "run/progress.h"
#include "run/step_line.h"

namespace leeway {

// On a terminal there is one line at the bottom that redraws itself: the last step, the count of
// other work, or the status, whichever came last. Elsewhere these are plain lines: steps and counts
// at most every two seconds, the status ever more rarely, once a minute at the least. Counts and
// the status are silent for the first two seconds. Notes and evaluations are lines that stay. Used
// by one thread.
class TerminalProgress final : public Progress {
 public:
  TerminalProgress() = default;
  ~TerminalProgress() override;
  TerminalProgress(const TerminalProgress&) = delete;
  TerminalProgress& operator=(const TerminalProgress&) = delete;

  void note(const std::string& line) override;
  void begin_steps(int64_t done) override;
  void step(int64_t step, int64_t total, const std::string& text) override;
  void count(const std::string& what, const std::string& unit, size_t done, size_t total) override;
  void evaluated(int64_t step, const EvaluationResult& result) override;
  void status(const std::string& line) override;

 private:
  using Time = std::chrono::steady_clock::time_point;
  struct Count {
    std::string what;
    size_t done = 0;
    Time begin, last;
    bool shown = false;
  };

  // In place of the line that was drawn before; a plain line where nothing is drawn.
  void draw(const std::string& line);
  void clear();

  StepLine step_line_;
  Time last_step_{};
  Count count_;
  Time begin_ = std::chrono::steady_clock::now(), last_status_ = begin_;
  bool drawn_ = false;
};

}  // namespace leeway
