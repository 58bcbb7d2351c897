// How to continue a run that ended early.
#pragma once

#include <string>

namespace leeway {

// A line with the command that continues a run; empty if it has no checkpoint.
std::string resume_hint(const std::string& run_folder);

// A word quoted for a shell where necessary.
std::string shell_word(const std::string& word);

}  // namespace leeway
