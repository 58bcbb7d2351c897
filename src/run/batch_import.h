// Dumps of other trainers, and rollouts files of our own, as batches for `loss compare` and `eval`.
#pragma once

#include <string>
#include <vector>

#include "leeway/loss.h"

namespace leeway {

struct ImportedBatch {
  Batch batch;
  std::vector<std::string> notes;  // what the dump lacks, or what was taken for what; for stderr
};

// `kind`:
//   prime-rl  token_exports/step_N, or one rank_R.jsonl of it
//   slime     a file of --save-debug-train-data, read by python3 with torch and weights_only
//   leeway    a rollouts file or a batch
// Throws Error naming file, line and problem, and for another kind.
ImportedBatch import_batch(const std::string& kind, const std::string& path);

// The batch in the format of docs/formats.md.
std::string batch_text(const Batch& batch);

}  // namespace leeway
