// Evaluation of weights on a run's held-out prompts.
#pragma once

#include "cli/run_setup.h"
#include "orchestrator/evaluation.h"

namespace leeway {

struct EvaluationResult {
  MetricList metrics;  // eval/..: docs/runs.md
  int64_t tokens = 0;
  double seconds = 0.0;
  double metric(const std::string& name) const { return metric_of(metrics, name); }
};

// Samples `table.prompts` prompts in float32, whatever rollouts use: the policy is evaluated, not
// its quantised copy. Uses `threads` threads (0: one per core). With `quiet` there is no progress.
EvaluationResult evaluate_policy(const RunSetup& setup, const Parameters& weights,
                                 const EvalTable& table, int threads, bool quiet);

}  // namespace leeway
