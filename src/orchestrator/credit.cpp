#include "orchestrator/credit.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "leeway/error.h"

namespace leeway {
namespace {

// The comparison also rejects NaN.
bool fits_float(double value) { return std::abs(value) <= std::numeric_limits<float>::max(); }

bool has_turn_rewards(const Rollout& rollout) {
  return std::any_of(rollout.credit.begin(), rollout.credit.end(),
                     [](const StepCredit& step) { return step.reward.has_value(); });
}

bool has_turn_rewards(const Group& group) {
  return std::any_of(group.rollouts.begin(), group.rollouts.end(),
                     [](const Rollout& rollout) { return has_turn_rewards(rollout); });
}

// The returns from each step on.
std::vector<double> returns_of(const Rollout& rollout, double reward) {
  std::vector<double> returns;
  for (size_t k = 0; k < rollout.steps.size(); ++k) {
    returns.push_back(reward);
    if (!rollout.credit.empty()) reward -= rollout.credit[k].reward.value_or(0.0);
  }
  return returns;
}

}  // namespace

std::string credit_problem(const Rollout& rollout) {
  if (rollout.credit.empty()) return "";
  if (rollout.credit.size() != rollout.steps.size()) {
    return fmt::format("credit has {} entries for {} steps", rollout.credit.size(),
                       rollout.steps.size());
  }
  for (size_t k = 0; k < rollout.steps.size(); ++k) {
    const StepCredit& credit = rollout.credit[k];
    if (credit.reward && !fits_float(*credit.reward)) {
      return fmt::format("the reward of step {} is {}: it must be a number that a float32 can hold",
                         k, *credit.reward);
    }
    const size_t given = credit.advantages.size(), tokens = rollout.steps[k].completion.size();
    if (given > 1 && given != tokens) {
      return fmt::format(
          "step {} has {} advantages: it must have one, or one for each of its {} tokens", k, given,
          tokens);
    }
    for (const double advantage : credit.advantages) {
      if (fits_float(advantage)) continue;
      return fmt::format(
          "step {} has the advantage {}: it must be a number that a float32 can hold", k,
          advantage);
    }
  }
  return "";
}

std::vector<std::vector<std::vector<double>>> turn_advantages(std::span<const Group> groups,
                                                              const AdvantageOptions& options) {
  std::vector<std::vector<std::vector<double>>> result(groups.size());
  if (std::none_of(groups.begin(), groups.end(),
                   [](const Group& group) { return has_turn_rewards(group); })) {
    return result;
  }
  std::vector<std::vector<std::vector<double>>> returns(groups.size());  // [group][rollout][step]
  size_t most_steps = 0;
  for (size_t g = 0; g < groups.size(); ++g) {
    GroupRewards rewards;
    for (const Rollout& rollout : groups[g].rollouts) {
      rewards.rewards.push_back(rollout.reward);
      rewards.lengths.push_back(rollout.sampled_tokens());
      most_steps = std::max(most_steps, rollout.steps.size());
    }
    const std::vector<double> shaped = shaped_rewards(rewards, options.length_penalty);
    for (size_t r = 0; r < groups[g].rollouts.size(); ++r) {
      returns[g].push_back(returns_of(groups[g].rollouts[r], shaped[r]));
    }
    if (!has_turn_rewards(groups[g])) continue;
    for (const std::vector<double>& each : returns[g]) result[g].emplace_back(each.size());
  }
  // All groups take part, for the sake of the kinds that look at the whole batch.
  for (size_t k = 0; k < most_steps; ++k) {
    std::vector<GroupRewards> there;
    std::vector<size_t> numbers;  // of the groups with such a step
    for (size_t g = 0; g < groups.size(); ++g) {
      GroupRewards own;
      for (const std::vector<double>& each : returns[g]) {
        if (k < each.size()) own.rewards.push_back(each[k]);
      }
      if (own.rewards.empty()) continue;
      there.push_back(std::move(own));
      numbers.push_back(g);
    }
    const AdvantageResult advantages = compute_advantages(there, {.kind = options.kind});
    for (size_t i = 0; i < there.size(); ++i) {
      auto next = advantages.advantages[i].begin();
      for (std::vector<double>& rollout : result[numbers[i]]) {
        if (k < rollout.size()) rollout[k] = *next++;
      }
    }
  }
  return result;
}

std::vector<float> token_advantages(const Sample& sample, const Rollout& rollout, double advantage,
                                    std::span<const double> by_step) {
  const bool given = std::any_of(rollout.credit.begin(), rollout.credit.end(),
                                 [](const StepCredit& step) { return !step.advantages.empty(); });
  if (!given && by_step.empty()) return {static_cast<float>(advantage)};
  LEEWAY_CHECK(sample.step.size() == sample.ids.size(), "every token has its step");
  // A step is in one sample, and its tokens are there in order.
  std::vector<size_t> seen(rollout.steps.size(), 0);
  std::vector<float> advantages;
  for (const int32_t at : sample.step) {
    double value = advantage;
    if (at >= 0) {
      const auto step = static_cast<size_t>(at);
      const size_t token = seen[step]++;
      if (!by_step.empty()) value = by_step[step];
      if (given && !rollout.credit[step].advantages.empty()) {
        const std::vector<double>& own = rollout.credit[step].advantages;
        value = own[own.size() == 1 ? 0 : token];
      }
    }
    advantages.push_back(static_cast<float>(value));
  }
  return advantages;
}

}  // namespace leeway
