// Evaluation of weights on a run's held-out prompts.
#pragma once

#include <functional>

#include "orchestrator/evaluation.h"
#include "run/run_setup.h"

namespace leeway {

struct EvaluationResult {
  MetricList metrics;  // eval/..: docs/runs.md
  int64_t tokens = 0;
  double seconds = 0.0;
  int64_t rollouts = 0, failed = 0;  // greedy ones among them; failed: after all retries
  std::string last_failure;
  bool stopped = false;  // by should_stop; the metrics are empty then
  double metric(const std::string& name) const { return metric_of(metrics, name); }
  bool nothing_completed() const { return !stopped && failed == rollouts; }
};

// Samples `table.prompts` prompts in float32, whatever rollouts use: the policy is evaluated, not
// its quantised copy. Uses `threads` threads (0: one per core). With `quiet` there is no progress.
// What fails is tried again as [orchestrator] says for training; what stays failed is counted.
// `should_stop` may be empty; it is asked all the time.
EvaluationResult evaluate_policy(const RunSetup& setup, const PolicySnapshot& weights,
                                 const EvalTable& table, int threads, bool quiet,
                                 const std::function<bool()>& should_stop = {});

// "5 of 248 rollouts failed, the last: ..", "all 248 rollouts failed, ..", or nothing.
std::string failures_text(const EvaluationResult& result);

// What an evaluation found, in a line for people.
std::string evaluation_line(int64_t step, const EvaluationResult& result);

}  // namespace leeway
