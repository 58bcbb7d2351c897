// Checks that a run's environments can work, before anything is trained.
#pragma once

#include "orchestrator/environment.h"

namespace leeway {

// Starts every environment and checks that both of its splits have prompts. Throws Error with the
// environment's id, the reason and the remedy.
void check_environments(const EnvironmentMix& environments);

}  // namespace leeway
