// The files step_N.jsonl of a folder, which a run writes one by one and a report reads.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace leeway {

struct StepFile {
  int64_t step = 0;
  std::string path;
};

// Sorted by step. Files of other names are left out, since no run wrote them; a folder that is
// missing has none.
std::vector<StepFile> step_files(const std::string& folder);

}  // namespace leeway
