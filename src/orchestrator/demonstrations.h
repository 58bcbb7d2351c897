// Loads conversations to learn from, from a file.
#pragma once

#include <string>
#include <vector>

#include "orchestrator/environment.h"

namespace leeway {

// JSON lines of either form:
//   {"prompt": "..", "completion": ".."}
//   {"messages": [{"role": "user", "content": ".."}, {"role": "assistant", ..}, ..], "tools":
//   [..]?}
// Each becomes an example whose `messages` end before the first assistant message and whose
// `demonstration` is the rest. Blank lines are skipped. Throws Error with file and line: no JSON,
// none of the forms, no assistant message, nothing before it; and for a file without a line.
std::vector<Example> load_demonstrations(const std::string& path);

}  // namespace leeway
