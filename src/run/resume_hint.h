// How a run that ended early goes on.
#pragma once

#include <string>

namespace leeway {

// Says on stderr the command that goes on with a run, if it has a checkpoint.
void say_how_to_resume(const std::string& run_folder);

// A word as a shell reads it back: in quotes where it needs them.
std::string shell_word(const std::string& word);

}  // namespace leeway
