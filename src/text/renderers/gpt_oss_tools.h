// Tool schemas as gpt-oss reads them: a TypeScript namespace.
#pragma once

#include <string>
#include <vector>

#include "text/renderers/json_value.h"

namespace leeway {

// "## functions" and the namespace, as the template writes it. Throws Error with the place in
// `tools` for what the template refuses, such as a function without a description.
std::string typescript_namespace(const std::vector<JsonValue>& tools);

}  // namespace leeway
