// Checks that a scheduler's state is possible. A file may be well formed and match its checksum and
// still be impossible: a scheduler that continued from it would abort, hang or draw prompts
// forever.
#pragma once

#include <cstdint>
#include <string>

#include "orchestrator/scheduler.h"

namespace leeway {

// Throws Error naming `name`, the key and why its value is impossible, for a state saved after
// update `step` of a run with `table` and a policy with `vocabulary` tokens.
void check_schedule_state(const std::string& name, const ScheduleState& state,
                          const OrchestratorTable& table, int64_t step, int64_t vocabulary);

}  // namespace leeway
