// Turns finished groups into a batch for the learner, with its metrics.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "orchestrator/advantage_program.h"
#include "orchestrator/advantages.h"
#include "orchestrator/interfaces.h"
#include "orchestrator/scheduler.h"

namespace leeway {

struct BatchOptions {
  AdvantageOptions advantage;
  // Answers in place of `advantage`, if not null. Turn rewards then count as part of the rollout's
  // reward alone.
  AdvantageProgram* program = nullptr;
  bool filter_zero_advantages = false;
  float temperature = 1.0f;
};

// A batch with everything it was made from. Rollouts are numbered across all groups.
struct PreparedBatch {
  TrainingBatch learner;
  std::vector<Group> groups;
  std::vector<std::vector<double>> advantages;  // [group][rollout]
  std::vector<size_t> first_sample;  // [rollouts + 1] into learner.samples; filtered ones have none
  std::vector<std::string> drop_reasons;  // [group] of the program; empty: it keeps the group
  Metrics metrics;                        // reward/*, off_policy_level/*, .. (docs/runs.md)
  int64_t sampled_tokens = 0;
  int64_t filtered_rollouts = 0;  // excluded from the update
};

// Splits each rollout into training samples and assigns its group's advantage, or what its
// environment says of single turns (credit.h). `step` is the number
// of the update (1, 2, ..), computed with weights of version step - 1; `ids` are the environments'
// ids. `should_stop` ends the retries of a program. Throws Error like compute_advantages and
// AdvantageProgram::ask.
PreparedBatch prepare_batch(
    int64_t step, std::vector<Group> groups, const std::vector<std::string>& ids,
    const BatchOptions& options, const std::function<bool()>& should_stop = [] { return false; });

}  // namespace leeway
