// Why a run has ended, kept in its folder as end.json and removed when the run is resumed. A
// finished run is recognised by it, even if its checkpoints are gone.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "orchestrator/scheduler.h"

namespace leeway {

struct RunEnd {
  std::string end;                       // finished | stopped | gave_up
  std::string reason;                    // in a sentence; empty if it completed
  int64_t steps = 0, max_steps = 0;      // of RL, or of the supervised training for `leeway sft`
  int64_t sft_steps = 0;                 // of the warm start
  double sft_seconds = 0.0, loss = 0.0;  // loss: the last one of `leeway sft`
  ScheduleTotals totals;                 // where rollouts went
};

// Throws Error if it cannot be written.
void write_run_end(const std::string& run_folder, const RunEnd& end);
// Returns nothing if the run is still going, was killed, or its file cannot be read.
std::optional<RunEnd> read_run_end(const std::string& run_folder);
void remove_run_end(const std::string& run_folder);

// "the run gave up after 12 steps: REASON", for log.txt and the terminal.
std::string run_end_line(const RunEnd& end);

}  // namespace leeway
