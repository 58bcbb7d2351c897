// How to continue a run that ended early.
#pragma once

#include <string>

namespace leeway {

// The command that goes on with a run, in a line for people; empty if it has no checkpoint.
std::string resume_hint(const std::string& run_folder);

// A word quoted for a shell where necessary.
std::string shell_word(const std::string& word);

}  // namespace leeway
