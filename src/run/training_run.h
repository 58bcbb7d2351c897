// One training run, as a library: warm start, the loop, evaluations, files. Prints nothing and
// handles no signals: what it tells goes to a Progress, and a StopCondition ends it early.
#pragma once

#include <string>
#include <vector>

#include "leeway/presets.h"
#include "run/progress.h"
#include "run/resumption.h"
#include "run/run_setup.h"
#include "run/run_summary.h"

namespace leeway {

// What a new run starts with. `notes` are told at its beginning. `optimizer`: a checkpoint whose
// moments it starts with; empty: none. `own_weights`: setup.weights are copied to weights/step_0
// and the run's config.toml names them as its model, so that it depends on no other folder.
struct NewRun {
  std::vector<std::string> notes;
  std::string optimizer;
  bool own_weights = false;
};

// A new run. Throws Error for the user's mistakes before anything is written; what fails later is
// in the summary.
RunSummary run_training(RunSetup& setup, const Catalog& catalog, const NewRun& start,
                        Progress& progress, const StopCondition& should_stop);

// What run_training checks before it writes anything: sampling settings, environments, prompts and
// programs, servers. Returns notes. Throws Error.
std::vector<std::string> check_training(const RunSetup& setup);

// Continues a run from its checkpoint as if it had not been interrupted.
RunSummary resume_training(const RunSetup& setup, const Catalog& catalog, Resumption resumption,
                           Progress& progress, const StopCondition& should_stop);

}  // namespace leeway
