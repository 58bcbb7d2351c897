// How a training run ended, for the final summary and for scripts.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "orchestrator/scheduler.h"
#include "run/resumption.h"

namespace leeway {

struct RunSummary {
  enum class End { finished, stopped, gave_up };
  // What was there when the run was resumed.
  struct Resumed {
    int64_t steps = 0, rollouts = 0;
    double sft_seconds = 0.0;
  };
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
  std::optional<Resumed> resumed;                 // seconds but those of sft count from there on
  // Folder of the last weights. Empty: they could not be saved, or an update had changed them
  // before (last_weights.h), of which a note tells.
  std::string weights;
  std::string report;            // the page; empty: it could not be written
  bool finished_before = false;  // there was nothing to resume, and nothing was done
};

const char* name_of(RunSummary::End end);

// Of a run that has finished, from what its folder holds.
RunSummary finished_summary(const Resumption& resumption);

// As `leeway train` prints it: as text, and with --json.
std::string summary_text(const RunSummary& summary);
std::string summary_json(const RunSummary& summary);

}  // namespace leeway
