// Batches of a run as files: whole ones (batches/step_N.json, in the format of docs/formats.md) and
// those that rollouts files hold (docs/runs.md), read back for `loss eval` and `loss compare`.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "leeway/loss.h"
#include "orchestrator/loop.h"

namespace leeway {

// The whole batch of a step, with every stream that its loss read.
std::string batch_json(const StepRecord& record);

struct BatchFile {
  Batch batch;
  std::vector<std::string> warnings;  // worth a word on stderr
  // Of a rollouts file: how many rollouts it holds, and of how many of the batch (unknown in files
  // that do not say). Such files keep pi and rollout alone.
  std::optional<size_t> rollouts, batch_rollouts;

  // "64 of the batch's 128 rollouts"; empty for a batch file, which is whole.
  std::string part_of_batch() const;
};

// Reads a file of rollouts if its name ends in .jsonl, otherwise a batch. Throws Error naming the
// file, the line and what is wrong.
BatchFile read_batch_file(const std::string& name);

// The file of that step in a run's folder: the whole batch where it was kept, otherwise its
// rollouts. Throws Error that says which steps there are.
std::string batch_file_of_run(const std::string& run, std::optional<int64_t> step);

// Why `spec` cannot be evaluated on the batch, for a stream that the file did not keep; empty: it
// can.
std::string missing_stream(const BatchFile& file, const LossSpec& spec);

}  // namespace leeway
