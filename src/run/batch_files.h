// Batches of a run as files: whole ones (batches/step_N.json, in the format of docs/formats.md) and
// those in rollouts files (docs/runs.md), read back for `loss eval` and `loss compare`.
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
  std::vector<std::string> warnings;  // for stderr
  // For a rollouts file: the number of rollouts in it, and in the batch (unknown for files that do
  // not say). Such files contain only pi and rollout.
  std::optional<size_t> rollouts, batch_rollouts;

  // "64 of the batch's 128 rollouts"; empty for a batch file, which is complete.
  std::string part_of_batch() const;
};

// Reads a rollouts file if the name ends in .jsonl, otherwise a batch. Throws Error naming the
// file, the line and the problem.
BatchFile read_batch_file(const std::string& name);

// The file of that step in a run's folder: the whole batch if it was kept, otherwise its rollouts.
// Throws Error listing the available steps.
std::string batch_file_of_run(const std::string& run, std::optional<int64_t> step);

// Why `spec` cannot be evaluated on the batch, if it needs a stream that the file does not contain;
// empty if it can.
std::string missing_stream(const BatchFile& file, const LossSpec& spec);

}  // namespace leeway
