// Loss specs as the text operators take: {"preset": "icepop", "icepop_ratio_low": 0.5}.
#pragma once

#include <string>
#include <string_view>

#include "leeway/loss.h"

namespace leeway {

// As strict as a configuration file: throws Error for text that is not one JSON object, a preset
// that is missing or unknown, and keys that are unknown, doubled or out of range.
LossSpec spec_from_json(std::string_view text);

}  // namespace leeway
