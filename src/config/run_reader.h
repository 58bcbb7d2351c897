// From values with places to the structs of run_config.h.
#pragma once

#include "config/config.h"
#include "config/given.h"

namespace leeway {

// Fills `run` and `renderer`, which hold defaults. Throws Error for a value of the wrong type or
// out of range, a key without effect, and an environment without a name.
void read_run(const Document& document, RunConfig& run, RendererConfig& renderer);

// Throws Error where keys contradict each other or the loss.
void check_run(const Document& document, const RunConfig& run, const LossSpec& loss);

// Every key of the run in the order of the dump, those of `loss_values` at their place. The
// arguments are only read.
std::vector<EffectiveValue> effective_values(const Document& document, RunConfig& run,
                                             RendererConfig& renderer,
                                             const std::vector<EffectiveValue>& loss_values);

}  // namespace leeway
