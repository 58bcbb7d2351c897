// How a run's text becomes tokens: what cannot work, what is probably not meant, and a line that
// says it.
#pragma once

#include <string>
#include <vector>

#include "run/run_setup.h"

namespace leeway {

// Encodes the prompts of its environments, thousands of each at most; a program's own are not known
// here. Returns notes: prompts that cannot be sampled from, a chat template that nobody uses, a
// stop text that is more than one token. Throws Error for an environment without a prompt to train
// on, unless the run `goes_on`: its data may no longer change.
std::vector<std::string> check_text(const RunSetup& setup, bool goes_on = false);

// The texts of the tokens at which replies end.
std::vector<std::string> stop_texts(const RunSetup& setup);
// "renderer qwen3, replies end at <|im_end|>"; "plain text, replies end at \n".
std::string text_line(const RunSetup& setup);

}  // namespace leeway
