// A trainer's state on disk.
//
//   config.json, model.safetensors   the policy, a Hugging Face folder; of an adapter
//                                    adapter_config.json, adapter_model.safetensors
//   optimizer.safetensors            moments
//   trainer.json                     {"format": 1, "optimizer_steps": n}; written last
//
// Ranks write weights and moments in parts, each with an index (saved_state.h).
#pragma once

#include <string>

#include "base/checked_files.h"
#include "trainer/optimizer.h"
#include "trainer/state_shard.h"

namespace leeway {

// A copy that further training does not change.
struct TrainingState {
  Parameters policy;
  AdamW optimizer;
};

// Its approximate size on disk.
uint64_t bytes_of(const TrainingState& state);

// Names what is not finite in a state, for messages; empty: everything is finite.
std::string not_finite_text(const TrainingState& state);

// Writes each file atomically and returns their sums. Throws Error, e.g. for a full disk.
FileSums save_state(const std::string& folder, const Parameters& policy, const AdamW& optimizer);

// Throws Error naming file and tensor for missing files, the state of a different model (other
// parameters, or the same ones in other roles), values that are not finite, and negative squares.
// Nothing is changed then.
void load_state(const std::string& folder, Parameters& policy, AdamW& optimizer);

// Throws Error unless the folder says that its weights are of this model.
void require_same_model(const std::string& folder, const StateModel& wanted);
int64_t read_steps(const std::string& folder);
FileSum write_steps(const std::string& folder, int64_t steps);

// Throws Error as `load_state` does, for whatever model is there, an adapter with the base that it
// names; returns its weights. Of the moments a tensor at a time is in memory.
Parameters check_state(const std::string& folder);
// The same for weights of the kind of `like`: an adapter over its base, or all of a model.
Parameters check_state_like(const Parameters& like, const std::string& folder);

}  // namespace leeway
