// Batches as JSON files: {"sequences": [{"pi", "rollout", "advantages", ..}, ..]}.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "leeway/loss.h"

namespace leeway {

struct LoadedBatch {
  Batch batch;
  std::vector<std::string> warnings;  // accepted, but to be told on stderr
};

// Reads a batch in one streaming pass: only the numbers are held in memory, not a document tree.
// Throws Error "NAME line L, column C: .." for malformed JSON, wrong types, missing or mismatched
// streams, and an empty batch.
LoadedBatch parse_batch(const std::string& name, std::string_view text);

}  // namespace leeway
