// Names of reward parts that a program makes up. Each is a metric of the run, so that a program
// which invents one per rollout would make metrics, report and memory grow without end.
#pragma once

#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "orchestrator/environment.h"

namespace leeway {

// The first kMostRewardNames names, none longer than kLongestRewardName bytes, are kept. From any
// thread.
inline constexpr size_t kMostRewardNames = 64, kLongestRewardName = 64;
class RewardNames {
 public:
  // Parts of other names become one part "other", of weight 1, that is worth as much as they are.
  void cap(std::vector<RewardPart>& parts);
  // Once: which name was the first that was not kept.
  std::optional<std::string> take_warning();

 private:
  std::mutex mutex_;
  std::set<std::string> names_;
  std::optional<std::string> warning_;
  bool warned_ = false;
};

}  // namespace leeway
