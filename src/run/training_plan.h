// What a run would do, for `leeway train --dry-run`: computed from what its setup has read.
#pragma once

#include <string>

#include "run/memory_check.h"
#include "run/run_setup.h"

namespace leeway {

// A few lines: model, parameters, device, environments with their prompts, loss, steps, memory.
std::string training_plan_text(const RunSetup& setup, const MemoryOfJob& job);
// The same as an object.
std::string training_plan_json(const RunSetup& setup, const MemoryOfJob& job);

}  // namespace leeway
