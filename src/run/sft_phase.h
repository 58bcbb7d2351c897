// Supervised training on demonstrations: the warm start of a run, and the job of `leeway sft`.
#pragma once

#include "leeway/presets.h"
#include "run/checkpoints.h"
#include "run/policy_evaluation.h"
#include "run/progress.h"
#include "run/run_files.h"
#include "run/run_setup.h"
#include "run/sft_state.h"

namespace leeway {

struct SftResult {
  Parameters weights;
  SftState state;
  bool stopped = false;  // by the stop condition
  std::string failure;   // not empty: gave up before a step; weights are the last good ones
};

// Throws Error saying why the training cannot go on from a checkpoint, although its sums are right.
void check_sft_checkpoint(const Checkpoint& checkpoint);

// What run_sft works with; all of it must outlive the call.
struct SftRun {
  const RunSetup& setup;
  const Catalog& catalog;
  RunFiles& files;
  Progress& progress;
  const StopCondition& should_stop;
  const CheckpointStore& checkpoints;
  PolicyEvaluator& evaluator;  // for sft.stop_at_reward
};

// Trains setup.weights as [sft] says, writing sft.jsonl, with checkpoints as [checkpoint] says,
// when it is stopped, and at the end. `from`: a checkpoint of the supervised training to go on
// from, bit for bit; null: from the beginning. Demonstrations come from the file of `data`, gone
// through in epochs of random order, or fresh from the environments. Throws Error for
// demonstrations that cannot be had.
SftResult run_sft(const SftRun& run, const Checkpoint* from);

}  // namespace leeway
