// One run of `leeway sft`: only the supervised training, with its files.
#pragma once

#include <string>

#include "config/config.h"
#include "leeway/presets.h"
#include "run/progress.h"
#include "run/resumption.h"
#include "run/sft_state.h"

namespace leeway {

class RunRanks;

struct SupervisedSummary {
  std::string end;     // "finished", "stopped" or "gave_up"
  std::string reason;  // for "gave_up"
  std::string folder, weights;
  SftState state;
  bool finished_before = false;  // it had finished before, and nothing was done
};

// A new run, or one that continues from its checkpoint. A finished one is left as it is. `ranks`
// share it; null: this process alone. Throws Error for user errors.
SupervisedSummary run_supervised(const Config& config, const Catalog& catalog, RunRanks* ranks,
                                 Progress& progress, const StopCondition& should_stop);
SupervisedSummary resume_supervised(const Config& config, const Catalog& catalog, RunRanks* ranks,
                                    Resumption resumption, Progress& progress,
                                    const StopCondition& should_stop);

// As `leeway sft` prints it: as text, and with --json.
std::string summary_text(const SupervisedSummary& summary);
std::string summary_json(const SupervisedSummary& summary);

}  // namespace leeway
