#include "orchestrator/reward_names.h"

#include <fmt/format.h>

#include <string_view>
#include <utility>

namespace leeway {

// Called with the lock held.
bool RewardNames::keeps(const std::string& name, const char* what, const char* fate) {
  if (names_.contains(name)) return true;
  if (name.size() <= kLongestRewardName && names_.size() < kMostRewardNames) {
    names_.insert(name);
    return true;
  }
  if (!warned_) {
    warned_ = true;
    warning_ = fmt::format(
        "its {} have more than {} names, or one of more than {} bytes; \"{}\" and others are {}: "
        "give {} names that do not change",
        what, kMostRewardNames, kLongestRewardName, name.substr(0, kLongestRewardName), fate,
        std::string_view(what) == "rewards" ? "parts" : "them");
  }
  return false;
}

void RewardNames::cap(std::vector<RewardPart>& parts) {
  const std::lock_guard lock(mutex_);
  RewardPart other{.name = "other", .weight = 1.0, .value = 0.0};
  const size_t before = parts.size();
  std::erase_if(parts, [&](const RewardPart& part) {
    if (keeps(part.name, "rewards", "counted as \"other\"")) return false;
    other.value += part.weight * part.value;
    return true;
  });
  if (parts.size() < before) parts.push_back(std::move(other));
}

void RewardNames::cap(NamedNumbers& metrics) {
  const std::lock_guard lock(mutex_);
  std::erase_if(metrics,
                [&](const auto& metric) { return !keeps(metric.first, "metrics", "left out"); });
}

std::optional<std::string> RewardNames::take_warning() {
  const std::lock_guard lock(mutex_);
  return std::exchange(warning_, std::nullopt);
}

}  // namespace leeway
