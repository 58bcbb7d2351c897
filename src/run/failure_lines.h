// Lines for people about rollouts that fail: the first of each environment at once, then at most
// one a second, which says how many there were beside it.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>

#include "orchestrator/scheduler.h"

namespace leeway {

// "rollout failed: ENVIRONMENT, example N: KIND: MESSAGE", with the first line of the message,
// escaped for terminals and cut to some hundred bytes.
std::string failure_line(const std::string& environment, const RolloutFailure& failure);

// Not thread-safe. Times are seconds that never fall.
class FailureLines {
 public:
  // The line to show for this failure, or nothing if one was shown within the last second; of an
  // environment that had none, always.
  std::optional<std::string> add(const std::string& environment, const RolloutFailure& failure,
                                 double now);
  // At the end: the number of failures that no line has told of.
  std::optional<std::string> rest();

 private:
  std::set<std::string, std::less<>> told_;  // environments
  std::optional<double> last_;
  int64_t untold_ = 0;
};

}  // namespace leeway
