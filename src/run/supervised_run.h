// One run of `leeway sft`: the supervised training alone, with its files.
#pragma once

#include <string>

#include "config/config.h"
#include "leeway/presets.h"
#include "run/resumption.h"
#include "run/sft_state.h"

namespace leeway {

struct SupervisedSummary {
  std::string end;     // "finished", "stopped" or "gave_up"
  std::string reason;  // of "gave_up"
  std::string folder, weights;
  SftState state;
  bool finished_before = false;  // there was nothing to resume, and nothing was done
};

// A new run, or one that goes on from its checkpoint. A finished one is left as it is. Throws Error
// for the user's mistakes.
SupervisedSummary run_supervised(const Config& config, const Catalog& catalog);
SupervisedSummary resume_supervised(const Config& config, const Catalog& catalog,
                                    Resumption resumption);

// The last screen, on stdout; what a person has to know besides, on stderr. The exit code.
int tell(const SupervisedSummary& summary, bool json);

}  // namespace leeway
