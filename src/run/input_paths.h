// The files and folders that a configuration names, looked at before anything is read of them: what
// is not there is refused by its key and the line that gives it. Their content is checked by those
// who read it.
#pragma once

#include <string>

#include "config/config.h"

namespace leeway {

// "run.toml line 3: model.path = "models/x"": a key with its value, and where it was given unless
// it is a default.
std::string given_text(const Config& config, const std::string& key, const std::string& value);

// Throws Error for a folder of a model, or a file of data, that is not there. Nothing is
// downloaded.
void check_input_paths(const Config& config);

}  // namespace leeway
