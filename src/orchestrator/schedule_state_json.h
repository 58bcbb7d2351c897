// A scheduler's state as JSON, for checkpoints. Numbers come back with the same bits, the sign of a
// zero excepted.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "orchestrator/scheduler.h"

namespace leeway {

// `ids` are the environments'.
std::string schedule_state_json(const ScheduleState& state, const std::vector<std::string>& ids);

// Examples are taken from `mix` by their index. Throws Error naming `name` and the key: no JSON,
// another format, a value that cannot be, an environment or example that `mix` has not.
ScheduleState parse_schedule_state(const std::string& name, std::string_view json,
                                   const EnvironmentMix& mix);

}  // namespace leeway
