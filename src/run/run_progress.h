// What a run says while it goes on, on stderr and in log.txt.
#pragma once

#include <chrono>
#include <string>

#include "run/run_files.h"

namespace leeway {

// On a terminal the last step's line redraws itself; elsewhere there is a plain line every two
// seconds at most. Lines of `note` stay. Used by one thread.
class RunProgress {
 public:
  // `files` may be null: nothing is logged. Must outlive this.
  explicit RunProgress(RunFiles* files) : files_(files) {}
  ~RunProgress();

  // A line that stays.
  void note(const std::string& line);
  // Step `step` of `total` ended; `text` says how. Rate and time left count from `begin` on.
  void begin(int64_t steps_before = 0);
  void step(int64_t step, int64_t total, const std::string& text);

 private:
  void clear();

  using Time = std::chrono::steady_clock::time_point;
  RunFiles* files_;
  Time begin_ = std::chrono::steady_clock::now(), last_{};
  bool drawn_ = false;
  int64_t steps_before_ = 0;
};

}  // namespace leeway
