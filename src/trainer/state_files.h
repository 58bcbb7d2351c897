// A trainer's state on disk.
//
//   config.json, model.safetensors   the policy, a Hugging Face folder
//   optimizer.safetensors            moments: `m.NAME` and `v.NAME` for each parameter
//   trainer.json                     {"format": 1, "optimizer_steps": n}; written last
#pragma once

#include <string>

#include "base/checked_files.h"
#include "trainer/optimizer.h"

namespace leeway {

// A copy, which training does not change.
struct TrainingState {
  Parameters policy;
  AdamW optimizer;
};

// Its length on disk, about.
uint64_t bytes_of(const TrainingState& state);

// Names what is not finite in a state, for messages; empty: everything is finite.
std::string not_finite_text(const TrainingState& state);

// Each file is written atomically; their sums. Throws Error (a full disk).
FileSums save_state(const std::string& folder, const Parameters& policy, const AdamW& optimizer);

// Throws Error naming file and tensor: missing files, another model's state (other parameters, or
// the same ones put to another use), values that are not finite, squares that are negative. Nothing
// is changed then.
void load_state(const std::string& folder, Parameters& policy, AdamW& optimizer);

// The same of whatever model is there.
TrainingState load_state(const std::string& folder);

}  // namespace leeway
