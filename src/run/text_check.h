// How a run's text becomes tokens: what cannot work, what is probably not meant, and a line that
// says it.
#pragma once

#include <string>
#include <vector>

#include "run/run_setup.h"

namespace leeway {

// Encodes the prompts of its environments, thousands of each at most; a program's own are not known
// here. Returns notes: prompts that the model has no room for, a chat template that nobody uses, a
// stop text that is more than one token. Throws Error for an environment without a prompt that the
// model can take, or with one whose tokens the model does not have.
std::vector<std::string> check_text(const RunSetup& setup);

// "renderer qwen3, replies end at <|im_end|>"; "plain text, replies end at \n".
std::string text_line(const RunSetup& setup);

}  // namespace leeway
