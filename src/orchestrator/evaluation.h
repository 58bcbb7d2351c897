// Evaluates a policy: rewards on held-out prompts, pass@k, and confidence intervals.
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

// An estimate from one value per prompt. Values within [0, 1] get Wilson's interval, with the
// effective number of prompts that their spread implies, so that it is accurate near 0 and 1;
// others get the normal interval. A single value has a degenerate interval or, within [0, 1],
// Wilson's.
Estimate estimate(const std::vector<double>& per_prompt);

// The probability that at least one of k samples drawn from n, of which `successes` are correct, is
// correct. k is at most n.
double pass_at_k(int64_t n, int64_t successes, int64_t k);

// eval/{all,env}/..: see docs/runs.md. With `greedy`, there is one sample per prompt at temperature
// 0: its mean reward, as eval/{env}/greedy/mean, and its failures. An environment in which nothing
// completed only has its counts.
Metrics evaluation_metrics(const std::vector<PromptResult>& results,
                           const std::vector<std::string>& ids, bool greedy);

}  // namespace leeway
