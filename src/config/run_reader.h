// From values with places to the structs of run_config.h.
#pragma once

#include "config/config.h"
#include "config/findings.h"
#include "config/given.h"

namespace leeway {

// Fills `run` and `renderer`, which hold defaults. Problems are a value of the wrong type or out of
// range, a key without effect, and an environment without a name.
void read_run(const Document& document, RunConfig& run, RendererConfig& renderer,
              Findings& findings);

// Problems are keys that contradict each other or the loss; nullptr: the loss has problems of its
// own.
void check_run(const Document& document, const RunConfig& run, const LossSpec* loss,
               Findings& findings);

// Makes input paths absolute. Those of the file, whose path is `file`, are relative to its folder
// where they exist there, all others to the working directory.
void resolve_paths(const Document& document, const std::string& file, RunConfig& run,
                   RendererConfig& renderer);

// Gives "auto" its number, after paths are resolved: a model's folder says how wide it is.
void decide_automatic(RunConfig& run);

// Every key of the run in the order of the dump, those of `loss_values` at their place. The
// arguments are only read.
std::vector<EffectiveValue> effective_values(const Document& document, RunConfig& run,
                                             RendererConfig& renderer,
                                             const std::vector<EffectiveValue>& loss_values);

}  // namespace leeway
