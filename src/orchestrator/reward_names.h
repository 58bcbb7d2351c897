// Names of reward parts and metrics that a program chooses. Each is a metric of the run, so a
// program that invents one per rollout would make metrics, report and memory grow without bound.
#pragma once

#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "orchestrator/environment.h"

namespace leeway {

// Keeps the first kMostRewardNames names, none longer than kLongestRewardName bytes. Thread-safe.
inline constexpr size_t kMostRewardNames = 64, kLongestRewardName = 64;
class RewardNames {
 public:
  // Merges parts with other names into one part "other" of weight 1 with their total value.
  void cap(std::vector<RewardPart>& parts);
  // Drops numbers with other names.
  void cap(NamedNumbers& metrics);
  // The first name that was not kept; returned once.
  std::optional<std::string> take_warning();

 private:
  bool keeps(const std::string& name, const char* what, const char* fate);

  std::mutex mutex_;
  std::set<std::string> names_;
  std::optional<std::string> warning_;
  bool warned_ = false;
};

}  // namespace leeway
