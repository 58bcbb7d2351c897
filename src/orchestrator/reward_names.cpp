#include "orchestrator/reward_names.h"

#include <fmt/format.h>

#include <utility>

namespace leeway {

void RewardNames::cap(std::vector<RewardPart>& parts) {
  const std::lock_guard lock(mutex_);
  RewardPart other{.name = "other", .weight = 1.0, .value = 0.0};
  const size_t before = parts.size();
  std::erase_if(parts, [&](const RewardPart& part) {
    if (names_.contains(part.name)) return false;
    const bool kept = part.name.size() <= kLongestRewardName && names_.size() < kMostRewardNames;
    if (kept) {
      names_.insert(part.name);
      return false;
    }
    if (!warned_) {
      warned_ = true;
      warning_ = fmt::format(
          "its rewards have more than {} names, or one of more than {} bytes; \"{}\" and others "
          "are "
          "counted as \"other\": give parts names that do not change",
          kMostRewardNames, kLongestRewardName, part.name.substr(0, kLongestRewardName));
    }
    other.value += part.weight * part.value;
    return true;
  });
  if (parts.size() < before) parts.push_back(std::move(other));
}

std::optional<std::string> RewardNames::take_warning() {
  const std::lock_guard lock(mutex_);
  return std::exchange(warning_, std::nullopt);
}

}  // namespace leeway
