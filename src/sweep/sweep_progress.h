// What a sweep reports while its runs are going.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <string>

#include "run/progress.h"

namespace leeway {

// Tells when a run has ended, and all the time how far everything is, at which rate and how long it
// still takes. Runs under way count by the steps in their metrics.jsonl.
class SweepProgress {
 public:
  // `finished` of `total` runs need not be run. `progress` must outlive this.
  SweepProgress(size_t total, size_t finished, Progress& progress);
  SweepProgress(const SweepProgress&) = delete;
  SweepProgress& operator=(const SweepProgress&) = delete;

  void began(size_t run, const std::string& folder, int64_t steps);
  void ended(size_t run, const std::string& text);
  // May be called at any time, even when nothing has happened.
  void show();

 private:
  struct Running {
    std::string file;  // metrics.jsonl: a line for each step
    int64_t steps = 0, done = 0;
    int64_t read = 0;  // bytes of it
  };
  using Time = std::chrono::steady_clock::time_point;

  void look();
  std::string text() const;

  size_t total_, before_, done_;
  std::map<size_t, Running> running_;
  Progress& progress_;
  Time begin_;
};

// "3/12 runs done, 2 running, 28 %, 1.4 runs/min, 2 h 21 min left". `share`: how much of a run the
// running ones have done together; `seconds` is the time for all but `before` runs.
std::string sweep_progress_text(size_t total, size_t before, size_t done, size_t running,
                                double share, double seconds);

}  // namespace leeway
