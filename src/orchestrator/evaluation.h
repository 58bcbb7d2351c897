// How good a policy is: rewards on held-out prompts, pass@k, and how sure that is.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "orchestrator/environment.h"
#include "orchestrator/interfaces.h"
#include "orchestrator/rollouts.h"

namespace leeway {

// A mean with its 95 % interval.
struct Estimate {
  double mean = 0.0, low = 0.0, high = 0.0;
};

// Of one value per prompt. Values within [0, 1] get Wilson's interval at the number of prompts that
// their spread amounts to, so that it is honest near 0 and 1; others the normal one. One value has
// no interval but itself or, within [0, 1], Wilson's.
Estimate estimate(const std::vector<double>& per_prompt);

// The chance that at least one of k samples out of n, of which `successes` are right, is right.
// k is at most n.
double pass_at_k(int64_t n, int64_t successes, int64_t k);

struct EvaluationOptions {
  int64_t prompts = 256;  // of all environments together, by weight; fewer where there are fewer
  int64_t samples = 1;    // of each prompt
  uint64_t seed = 0;
};

struct PromptResult {
  size_t environment = 0;
  std::vector<double> rewards;
  int64_t successes = 0;  // rollouts whose first reward part is 1 or more
  int64_t failures = 0;   // rollouts that failed; they are in no average
  int64_t tokens = 0;
};

// Samples held-out prompts through `driver`, which must be idle. `progress(done, total)` is called
// now and then. Throws Error naming the last failure if no rollout completed.
std::vector<PromptResult> sample_held_out(
    const EnvironmentMix& mix, RolloutDriver& driver, const EvaluationOptions& options,
    const std::function<void(size_t done, size_t total)>& progress);

// eval/{all,env}/..: docs/runs.md. With `greedy`, one sample per prompt at temperature 0: its mean
// reward alone, as eval/{env}/greedy/mean.
MetricList evaluation_metrics(const std::vector<PromptResult>& results,
                              const std::vector<std::string>& ids, bool greedy);

}  // namespace leeway
