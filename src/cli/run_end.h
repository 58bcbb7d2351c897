// How a run ended, in RUN/end.json: written last of all, and gone while the run goes on again. A
// finished run is known by it, whatever became of its checkpoints.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "orchestrator/scheduler.h"

namespace leeway {

struct RunEnd {
  std::string end;                       // "finished", "stopped" or "gave_up"
  std::string reason;                    // of "gave_up"
  int64_t steps = 0, max_steps = 0;      // of RL; of the supervised training for `leeway sft`
  int64_t sft_steps = 0;                 // of the warm start
  double sft_seconds = 0.0, loss = 0.0;  // loss: the last one, of `leeway sft`
  ScheduleTotals totals;                 // where rollouts went
};

void write_end(const std::string& run_folder, const RunEnd& end);
// Nothing: there is none, or it cannot be read.
std::optional<RunEnd> read_end(const std::string& run_folder);
void remove_end(const std::string& run_folder);

}  // namespace leeway
