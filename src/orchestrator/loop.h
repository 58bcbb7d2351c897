// Sampling and learning side by side: batches go to the learner, weights come back.
//
// The calling thread runs the scheduler and, with an engine in process, samples; the learner works
// on threads of its own. Nothing here waits without a bound.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "orchestrator/batch.h"
#include "orchestrator/interfaces.h"
#include "orchestrator/scheduler.h"

namespace leeway {

// One update, as it is reported when it has ended.
struct StepRecord {
  int64_t step = 0;
  PreparedBatch batch;
  LearnerResult learned;
  Metrics metrics;                     // everything of metrics.jsonl, `step` excepted
  std::vector<DroppedGroup> given_up;  // groups, since the step before
  std::string last_failure;            // of a rollout, since the start; may be empty
};

struct LoopOptions {
  int64_t max_steps = 1;
  BatchOptions batch;
  int64_t steps_before = 0;  // made before a resume
};

struct LoopEvents {
  // Called on the loop's thread after each update, while the next one may already be going on.
  std::function<void(const StepRecord&)> on_step;
  // Asked all the time: true ends the loop after the update in progress.
  std::function<bool()> should_stop;
  // Whether everything is to be saved after this update; and the saving, with the learner at rest
  // and the sampler on its newest weights. Always asked for at the end, unless the run gave up.
  std::function<bool(int64_t step)> wants_checkpoint;
  std::function<void(int64_t step, const ScheduleState& state)> on_checkpoint;
};

struct LoopResult {
  enum class End { finished, stopped, gave_up };
  End end = End::finished;
  int64_t steps = 0;   // updates made, those before a resume among them
  std::string reason;  // gave_up: what failed, how often, the last real error
};

LoopResult run_loop(RolloutScheduler& scheduler, Learner& learner, const Clock& clock,
                    const std::vector<std::string>& environment_ids, const LoopOptions& options,
                    const LoopEvents& events);

}  // namespace leeway
