// Runs sampling and learning concurrently: batches go to the learner, weights come back.
//
// The calling thread runs the scheduler and, with an in-process engine, samples; the learner works
// on its own threads. Nothing here waits without a bound.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "orchestrator/batch.h"
#include "orchestrator/interfaces.h"
#include "orchestrator/scheduler.h"

namespace leeway {

// One finished update.
struct StepRecord {
  int64_t step = 0;
  PreparedBatch batch;
  LearnerResult learned;
  Metrics metrics;                     // everything in metrics.jsonl except `step`
  std::vector<DroppedGroup> given_up;  // groups, since the step before
  std::string last_failure;            // of a rollout, since the start; may be empty
};

struct LoopOptions {
  int64_t max_steps = 1;
  BatchOptions batch;
  int64_t steps_before = 0;  // completed before a resume
};

struct LoopEvents {
  // Called on the loop's thread after each update, while the next one may already be running.
  std::function<void(const StepRecord&)> on_step;
  // Called on the loop's thread for each rollout that fails, soon after it does; may be empty.
  std::function<void(const RolloutFailure&)> on_failure;
  // Called on the loop's thread after each slice of sampling, in which the sampler may have got new
  // weights; may be empty.
  std::function<void()> on_sampled;
  // More metrics of a step, of the sampler for example; may be empty.
  std::function<Metrics()> more_metrics;
  // Polled throughout: returning true ends the loop after the current update.
  std::function<bool()> should_stop;
  // Whether to save a checkpoint after this update; and the function that saves it, called with the
  // learner idle and the sampler on the newest weights. Also called at the end, unless the run gave
  // up.
  std::function<bool(int64_t step)> wants_checkpoint;
  std::function<void(int64_t step, const ScheduleState& state)> on_checkpoint;
};

struct LoopResult {
  enum class End { finished, stopped, gave_up };
  End end = End::finished;
  int64_t steps = 0;   // total updates, including those before a resume
  std::string reason;  // gave_up: what failed, how often, and the last error
};

LoopResult run_loop(RolloutScheduler& scheduler, Learner& learner, const Clock& clock,
                    const std::vector<std::string>& environment_ids, const LoopOptions& options,
                    const LoopEvents& events);

}  // namespace leeway
