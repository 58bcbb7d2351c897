// Held-out prompts sampled under the failure policy of the run: what fails is tried again, what
// stays failed is counted and named, and nothing of it ends the run.
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
  int64_t prompts = 256;  // of all environments together, by weight; fewer where there are fewer
  int64_t samples = 1;    // of each prompt
  uint64_t seed = 0;
  // The failure policy: attempts of a rollout (nothing: without end), seconds before the second of
  // them, which double up to a minute, and failures in a row, of all rollouts, after which none is
  // tried again. The last is never below the number of rollouts: all of them may have been under
  // way when an outage began.
  std::optional<int64_t> max_attempts = 1;
  double retry_backoff = 0.1;
  double most_failures_in_a_row = std::numeric_limits<double>::infinity();
  // Asked all the time; may be empty. True ends the evaluation at once.
  std::function<bool()> should_stop = {};
};

struct PromptResult {
  size_t environment = 0;
  std::vector<double> rewards;
  int64_t successes = 0;  // rollouts whose first reward part is 1 or more
  int64_t failures = 0;   // rollouts that stayed failed; they are in no average
  int64_t tokens = 0;
};

struct HeldOutResult {
  std::vector<PromptResult> prompts;
  int64_t rollouts = 0, completed = 0, failed = 0;  // failed: for good
  std::string last_failure;                         // with its environment; empty: none
  bool stopped = false;                             // by should_stop: what is here is not all
};

// Samples held-out prompts through `driver`, which must be idle, and is idle again afterwards.
// `progress(done, total)` is called now and then. Throws Error if there is no held-out prompt.
HeldOutResult sample_held_out(const EnvironmentMix& mix, RolloutDriver& driver, Clock& clock,
                              const EvaluationOptions& options,
                              const std::function<void(size_t done, size_t total)>& progress);

}  // namespace leeway
