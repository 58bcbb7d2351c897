// One run of `leeway train`: warm start, the loop, evaluation, files.
#pragma once

#include <string>
#include <vector>

#include "leeway/presets.h"
#include "run/resumption.h"
#include "run/run_files.h"
#include "run/run_setup.h"

namespace leeway {

// How a run ended, for the last screen and for scripts.
struct RunSummary {
  enum class End { finished, stopped, gave_up };
  End end = End::finished;
  std::string reason;  // why it did not finish
  std::string folder;
  int64_t sft_steps = 0, steps = 0, max_steps = 0;
  double sft_seconds = 0.0, rl_seconds = 0.0, eval_seconds = 0.0, seconds = 0.0;
  int64_t rollouts = 0, sampled_tokens = 0, trained_tokens = 0;
  double sampler_busy = 0.0, trainer_busy = 0.0;  // shares of the loop's wall time
  ScheduleTotals totals;                          // where rollouts went
  int64_t running = 0;                            // rollouts in flight at the end
  Metrics before, after;                          // evaluations
  std::string weights;           // folder of the last weights; empty: they could not be saved
  bool finished_before = false;  // there was nothing to resume, and nothing was done
};

const char* name_of(RunSummary::End end);

// Throws Error for the user's mistakes before anything is written; what fails later is in the
// summary. Progress goes to stderr.
//
// A new run. `notes` are said at its beginning. `optimizer`: a checkpoint whose moments it starts
// with; empty: none. `own_weights`: setup.weights are copied to weights/step_0 and the run's
// config.toml names them as its model, so that it depends on no other folder.
struct NewRun {
  std::vector<std::string> notes;
  std::string optimizer;
  bool own_weights = false;
};
RunSummary run_training(RunSetup& setup, const Catalog& catalog, const NewRun& start);

// Throws Error saying why a run cannot go on from a checkpoint, although its sums are right.
void check_checkpoint(const RunSetup& setup, const Checkpoint& checkpoint);

// Goes on with a run from its checkpoint, as if it had not been interrupted.
RunSummary resume_training(const RunSetup& setup, const Catalog& catalog, Resumption resumption);

// Of a run that has finished, from what its folder holds.
RunSummary finished_summary(const Resumption& resumption);

}  // namespace leeway
