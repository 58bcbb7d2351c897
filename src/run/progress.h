// What a run reports while it is going. The library reports events; the caller decides how they are
// shown: the program draws them on a terminal, tests record them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace leeway {

struct EvaluationResult;

// Returns true if the run should stop, after the current step and a checkpoint. First called when
// the run's folder exists, then polled throughout, on the thread that executes the run.
using StopCondition = std::function<bool()>;

// Called on the thread that runs the run.
class Progress {
 public:
  virtual ~Progress() = default;

  // A line of text that stays visible.
  virtual void note(const std::string& line) = 0;
  // A phase of training steps begins, `done` of which were made before a resume. The rate and the
  // time left count from here.
  virtual void begin_steps(int64_t done) = 0;
  // Step `step` of `total` has ended; `text` has its numbers.
  virtual void step(int64_t step, int64_t total, const std::string& text) = 0;
  // `done` of `total` units of other work, such as the rollouts of an evaluation, are done. A count
  // that falls, or another `what`, begins a new piece of work.
  virtual void count(const std::string& what, const std::string& unit, size_t done,
                     size_t total) = 0;
  // An evaluation of step `step` has ended, or was stopped.
  virtual void evaluated(int64_t step, const EvaluationResult& result) = 0;
  // Overall progress, in a line that replaces the previous one.
  virtual void status(const std::string& line) = 0;
};

}  // namespace leeway
