// Samples held-out prompts under the run's failure policy: failures are retried, those that persist
// are counted and reported, and none of them ends the run.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "orchestrator/environment.h"
#include "orchestrator/interfaces.h"
#include "orchestrator/rollouts.h"

namespace leeway {

struct EvaluationOptions {
  int64_t prompts = 256;  // over all environments, by weight; fewer if there are fewer
  int64_t samples = 1;    // of each prompt
  uint64_t seed = 0;
  // The failure policy: attempts per rollout (nothing: unlimited), seconds before the second
  // attempt, which double up to a minute, and the number of consecutive failures over all rollouts
  // after which nothing is retried. The last is never below the number of rollouts, since all of
  // them may have been in flight when an outage began.
  std::optional<int64_t> max_attempts = 1;
  double retry_backoff = 0.1;
  double most_failures_in_a_row = std::numeric_limits<double>::infinity();
  // Polled throughout; may be empty. Returning true ends the evaluation at once.
  std::function<bool()> should_stop = {};
  // Told of each attempt that fails, at once; may be empty.
  std::function<void(size_t environment, uint64_t example, FailureKind, const std::string& message)>
      on_failure = {};
};

struct PromptResult {
  size_t environment = 0;
  std::vector<double> rewards;
  int64_t successes = 0;  // rollouts whose first reward part is 1 or more
  int64_t failures = 0;   // rollouts that failed for good; excluded from all averages
  int64_t tokens = 0;
};

struct HeldOutResult {
  std::vector<PromptResult> prompts;
  int64_t rollouts = 0, completed = 0, failed = 0;  // failed: for good
  std::string last_failure;                         // with its environment; empty: none
  bool stopped = false;                             // by should_stop: the result is incomplete
};

// Samples held-out prompts through `driver`, which must be idle and is idle again afterwards. Calls
// `progress(done, total)` now and then. Throws Error if there is no held-out prompt.
HeldOutResult sample_held_out(const EnvironmentMix& mix, RolloutDriver& driver, Clock& clock,
                              const EvaluationOptions& options,
                              const std::function<void(size_t done, size_t total)>& progress);

}  // namespace leeway
