// How a run that ended early goes on.
#pragma once

#include <string>

namespace leeway {

// The command that goes on with a run, in a line for people; empty if it has no checkpoint.
std::string resume_hint(const std::string& run_folder);

// A word as a shell reads it back: in quotes where it needs them.
std::string shell_word(const std::string& word);

}  // namespace leeway
