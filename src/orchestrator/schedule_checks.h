// Whether a scheduler's state can be that of a run. A file may be well formed and its checksum
// right, and yet what it says impossible: a scheduler that went on from it would abort, wait for
// ever or draw prompts until the end of days.
#pragma once

#include <cstdint>
#include <string>

#include "orchestrator/scheduler.h"

namespace leeway {

// Throws Error naming `name`, the key and why its value cannot be, for a state saved after update
// `step` of a run with `table` and a policy with `vocabulary` tokens.
void check_schedule_state(const std::string& name, const ScheduleState& state,
                          const OrchestratorTable& table, int64_t step, int64_t vocabulary);

}  // namespace leeway
