// A scheduler's state as JSON, for checkpoints. Numbers are restored with the same bits, except the
// sign of zero.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "orchestrator/scheduler.h"

namespace leeway {

// `ids` are the environments' ids.
std::string schedule_state_json(const ScheduleState& state, const std::vector<std::string>& ids);

// Examples are looked up in `mix` by index. Throws Error naming `name` and the key for invalid
// JSON, another format, an impossible value, and an environment or example that `mix` does not
// have.
ScheduleState parse_schedule_state(const std::string& name, std::string_view json,
                                   const EnvironmentMix& mix);

}  // namespace leeway
