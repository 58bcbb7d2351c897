#include "orchestrator/advantages.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "leeway/error.h"

namespace leeway {
namespace {

// Sums in ascending order, so that the result does not depend on the order in which rollouts
// finished.
double sum(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  double total = 0.0;
  for (const double value : values) total += value;
  return total;
}

// sqrt(sum of squares / count), scaled so that squares of small differences do not underflow.
double root_mean_square(std::vector<double> values, double count) {
  double largest = 0.0;
  for (const double value : values) largest = std::max(largest, std::abs(value));
  if (largest == 0.0) return 0.0;
  for (double& value : values) value = (value / largest) * (value / largest);
  return largest * std::sqrt(sum(std::move(values)) / count);
}

bool all_equal(const std::vector<double>& values) {
  return std::all_of(values.begin(), values.end(), [&](double v) { return v == values.front(); });
}

void check_group(const GroupRewards& group, size_t number) {
  if (group.rewards.empty()) throw Error(fmt::format("group {} has no rollouts", number));
  for (size_t i = 0; i < group.rewards.size(); ++i) {
    if (std::isfinite(group.rewards[i])) continue;
    throw Error(fmt::format("the reward of rollout {} of group {} is {}: it must be finite", i,
                            number, group.rewards[i]));
  }
}

// The factor for a group's differences from its mean; reinforce_pp scales by the batch.
double group_scale(AdvantageKind kind, const std::vector<double>& differences, double mean) {
  const double count = static_cast<double>(differences.size());
  switch (kind) {
    case AdvantageKind::group_mean:
    case AdvantageKind::reinforce_pp:
    case AdvantageKind::batch_mean:
    case AdvantageKind::none: return 1.0;
    case AdvantageKind::leave_one_out: return count / (count - 1.0);
    case AdvantageKind::max_rl: return mean > 0.0 ? 1.0 / mean : 0.0;
    case AdvantageKind::group_deviation: {
      const double deviation = root_mean_square(differences, count - 1.0);
      return deviation > 0.0 ? 1.0 / deviation : 0.0;
    }
  }
  return 0.0;
}

void scale_by_batch(std::vector<std::vector<double>>& groups) {
  std::vector<double> all;
  for (const std::vector<double>& group : groups) all.insert(all.end(), group.begin(), group.end());
  const double count = static_cast<double>(all.size());
  const double deviation = root_mean_square(std::move(all), count);
  if (deviation == 0.0) return;
  for (std::vector<double>& group : groups) {
    for (double& advantage : group) advantage /= deviation;
  }
}

// The mean of all rewards of the batch; exactly theirs if they are all equal.
double batch_mean(const std::vector<std::vector<double>>& groups) {
  std::vector<double> all;
  for (const std::vector<double>& group : groups) all.insert(all.end(), group.begin(), group.end());
  if (all.empty() || all_equal(all)) return all.empty() ? 0.0 : all.front();
  const double count = static_cast<double>(all.size());
  return sum(std::move(all)) / count;
}

bool compares_group(AdvantageKind kind) {
  return kind != AdvantageKind::none && kind != AdvantageKind::batch_mean;
}

// For the kinds that do not compare the rollouts of a group.
void subtract_batch_baseline(AdvantageKind kind, AdvantageResult& result) {
  const double mean = kind == AdvantageKind::batch_mean ? batch_mean(result.advantages) : 0.0;
  for (std::vector<double>& group : result.advantages) {
    for (double& value : group) value -= mean;
    const bool zero = std::all_of(group.begin(), group.end(), [](double a) { return a == 0.0; });
    if (group.size() > 1 && zero) ++result.zero_variance_groups;
  }
}

}  // namespace

std::vector<double> shaped_rewards(const GroupRewards& group, double length_penalty) {
  std::vector<double> rewards = group.rewards;
  if (length_penalty == 0.0) return rewards;
  LEEWAY_CHECK(group.lengths.size() == rewards.size(), "one length per reward");
  const double best = *std::max_element(rewards.begin(), rewards.end());
  if (best <= 0.0) return rewards;
  int64_t shortest = INT64_MAX, longest = INT64_MIN;
  for (size_t i = 0; i < rewards.size(); ++i) {
    if (rewards[i] != best) continue;
    shortest = std::min(shortest, group.lengths[i]);
    longest = std::max(longest, group.lengths[i]);
  }
  if (shortest == longest) return rewards;
  const double range = static_cast<double>(longest - shortest);
  for (size_t i = 0; i < rewards.size(); ++i) {
    if (rewards[i] != best) continue;
    rewards[i] -= length_penalty * (static_cast<double>(group.lengths[i] - shortest) / range);
  }
  return rewards;
}

AdvantageResult compute_advantages(std::span<const GroupRewards> groups,
                                   const AdvantageOptions& options) {
  if (!(options.length_penalty >= 0.0) || !std::isfinite(options.length_penalty)) {
    throw Error(fmt::format("length_penalty is {}: it must be 0 (off) or a positive number",
                            options.length_penalty));
  }
  AdvantageResult result;
  for (size_t g = 0; g < groups.size(); ++g) {
    check_group(groups[g], g);
    std::vector<double> values = shaped_rewards(groups[g], options.length_penalty);
    const bool single = values.size() == 1;
    if (!compares_group(options.kind)) {
      result.singleton_groups += single ? 1 : 0;
      result.advantages.push_back(std::move(values));
      continue;
    }
    if (single || all_equal(values)) {
      ++(single ? result.singleton_groups : result.zero_variance_groups);
      result.advantages.emplace_back(values.size(), 0.0);
      continue;
    }
    const double mean = sum(values) / static_cast<double>(values.size());
    for (double& value : values) value -= mean;
    const double scale = group_scale(options.kind, values, mean);
    for (double& value : values) value *= scale;
    result.advantages.push_back(std::move(values));
  }
  if (options.kind == AdvantageKind::reinforce_pp) scale_by_batch(result.advantages);
  if (!compares_group(options.kind)) subtract_batch_baseline(options.kind, result);
  for (size_t g = 0; g < groups.size(); ++g) {
    for (size_t i = 0; i < result.advantages[g].size(); ++i) {
      if (std::isfinite(result.advantages[g][i])) continue;
      throw Error(fmt::format(
          "the advantage of rollout {} of group {} is not finite: rewards such as {} are too large",
          i, g, groups[g].rewards[i]));
    }
  }
  return result;
}

}  // namespace leeway
