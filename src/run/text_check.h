// How a run's text becomes tokens: what cannot work, what is probably not meant, and a line that
// says it.
#pragma once

#include <string>
#include <vector>

#include "run/run_setup.h"

namespace leeway {

// Encodes prompts of each environment, at most 4096 of a split and about 8 MB of text. `process`
// environments are left out: their programs may sample from prompts that are not in a file.
//
// Returns notes about: prompts that the run cannot sample from; a model folder with a chat template
// while no renderer is configured; a rollout.stop that is more than one token. Throws Error if
// an environment has no prompt to train on. A resumed run (`goes_on`) only gets a note of that,
// since a resume may not change its data.
std::vector<std::string> check_text(const RunSetup& setup, bool goes_on = false);

// The texts of the tokens at which replies end.
std::vector<std::string> stop_texts(const RunSetup& setup);
// "renderer qwen3, replies end at <|im_end|>"; "plain text, replies end at \n".
std::string text_line(const RunSetup& setup);

}  // namespace leeway
