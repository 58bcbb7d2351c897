// How good a policy is: rewards on held-out prompts, pass@k, and how sure that is.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "orchestrator/held_out.h"
#include "orchestrator/interfaces.h"

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

// eval/{all,env}/..: docs/runs.md. With `greedy`, one sample per prompt at temperature 0: its mean
// reward, as eval/{env}/greedy/mean, and its failures. An environment of which nothing completed
// has its counts alone.
Metrics evaluation_metrics(const std::vector<PromptResult>& results,
                           const std::vector<std::string>& ids, bool greedy);

}  // namespace leeway
