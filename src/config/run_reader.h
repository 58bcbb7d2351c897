// Turns values with places into the structs of run_config.h.
#pragma once

#include "config/config.h"
#include "config/findings.h"
#include "config/given.h"

namespace leeway {

// Fills `run` and `renderer`, which hold the defaults. Values of the wrong type or out of range,
// keys without effect and environments without a name are problems.
void read_run(const Document& document, RunConfig& run, RendererConfig& renderer,
              Findings& findings);

// Reports keys that contradict each other or the loss. `loss` is nullptr if the loss has problems
// of its own.
void check_run(const Document& document, const RunConfig& run, const LossSpec* loss,
               Findings& findings);

// Makes input paths absolute. Those of the file, whose path is `file`, are relative to its folder
// if they exist there; all others are relative to the working directory.
void resolve_paths(const Document& document, const std::string& file, RunConfig& run,
                   RendererConfig& renderer);

// Replaces "auto" by its number. Call after paths are resolved: the model's folder determines its
// width.
void decide_automatic(RunConfig& run);

// Every key of the run in the order of the dump, with those of `loss_values` in their place. The
// arguments are not modified.
std::vector<EffectiveValue> effective_values(const Document& document, RunConfig& run,
                                             RendererConfig& renderer,
                                             const std::vector<EffectiveValue>& loss_values);

}  // namespace leeway
