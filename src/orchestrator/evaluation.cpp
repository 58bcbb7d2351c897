#include "orchestrator/evaluation.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

#include "leeway/error.h"

namespace leeway {
namespace {

constexpr double kQuantile = 1.959963984540054;  // of the normal distribution, 97.5 %

double mean_of(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

}  // namespace

Estimate estimate(const std::vector<double>& per_prompt) {
  LEEWAY_CHECK(!per_prompt.empty(), "an estimate needs a value");
  const double n = static_cast<double>(per_prompt.size()), mean = mean_of(per_prompt);
  double squares = 0.0;
  for (double value : per_prompt) squares += (value - mean) * (value - mean);
  const auto [least, most] = std::minmax_element(per_prompt.begin(), per_prompt.end());
  if (*least < 0.0 || *most > 1.0) {
    const double half = n > 1 ? kQuantile * std::sqrt(squares / (n - 1) / n) : 0.0;
    return {mean, mean - half, mean + half};
  }
  // For zeros and ones: n itself. Equal values are compared directly, since their squared
  // differences may be rounding noise.
  const double effective =
      *least < *most ? std::max(1.0, mean * (1.0 - mean) / (squares / n / n)) : n;
  const double z = kQuantile * kQuantile / effective;
  const double centre = (mean + z / 2) / (1 + z);
  const double half =
      kQuantile / (1 + z) * std::sqrt(mean * (1 - mean) / effective + z / (4 * effective));
  return {mean, std::max(0.0, std::min(mean, centre - half)),
          std::min(1.0, std::max(mean, centre + half))};
}

double pass_at_k(int64_t n, int64_t successes, int64_t k) {
  LEEWAY_CHECK(k >= 1 && k <= n && successes >= 0 && successes <= n, "k samples out of n");
  if (n - successes < k) return 1.0;
  double none = 1.0;  // probability that all k of n samples are wrong
  for (int64_t i = 0; i < k; ++i) {
    none *= static_cast<double>(n - successes - i) / static_cast<double>(n - i);
  }
  return 1.0 - none;
}

Metrics evaluation_metrics(const std::vector<PromptResult>& results,
                           const std::vector<std::string>& ids, bool greedy) {
  Metrics out;
  const auto write = [&](const std::string& name, const Estimate& value) {
    out.emplace_back(name + (name.ends_with("reward") ? "/mean" : ""), value.mean);
    out.emplace_back(name + "/low", value.low);
    out.emplace_back(name + "/high", value.high);
  };
  const auto write_environment = [&](const std::string& id, auto&& belongs) {
    std::vector<double> rewards;
    std::map<int64_t, std::vector<double>> passes;
    int64_t failures = 0;
    bool any = false;
    for (const PromptResult& prompt : results) {
      if (!belongs(prompt)) continue;
      any = true;
      failures += prompt.failures;
      const auto n = static_cast<int64_t>(prompt.rewards.size());
      if (n == 0) continue;
      rewards.push_back(mean_of(prompt.rewards));
      for (int64_t k = 1; k <= n; k *= 2) passes[k].push_back(pass_at_k(n, prompt.successes, k));
    }
    if (!any) return;
    const std::string name = "eval/" + id;
    if (greedy) {
      if (!rewards.empty()) out.emplace_back(name + "/greedy/mean", mean_of(rewards));
      out.emplace_back(name + "/greedy/failed_rollouts", static_cast<double>(failures));
      return;
    }
    if (!rewards.empty()) write(name + "/reward", estimate(rewards));
    for (const auto& [k, values] : passes)
      write(fmt::format("{}/pass@{}", name, k), estimate(values));
    out.emplace_back(name + "/prompts", static_cast<double>(rewards.size()));
    out.emplace_back(name + "/failed_rollouts", static_cast<double>(failures));
  };
  write_environment("all", [](const PromptResult&) { return true; });
  for (size_t e = 0; e < ids.size(); ++e) {
    write_environment(ids[e], [&](const PromptResult& prompt) { return prompt.environment == e; });
  }
  return out;
}

}  // namespace leeway
