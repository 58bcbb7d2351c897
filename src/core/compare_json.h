// A comparison of presets as JSON members, for the command, its page and Python.
#pragma once

#include "base/json.h"
#include "core/compare.h"

namespace leeway {

// Writes the members of an object that the caller has begun.
void write_comparison(JsonWriter& json, const Comparison& comparison);

}  // namespace leeway
