// A trainer's state on disk, tensor by tensor: each parameter's weight under its name in a folder
// of weights (model/weight_files.h) and its moments `m.NAME` and `v.NAME`, whole tensors, in
//
//   model.safetensors, optimizer.safetensors        by one process
//   model-00001-of-00004.safetensors, ..,           by ranks, each the tensors that it has most of
//   optimizer-00001-of-00004.safetensors, ..
//   model.safetensors.index.json,                   which tensor is in which of these
//   optimizer.safetensors.index.json
//
// Of an adapter the weights are adapter_model.safetensors, or parts of it. Nobody needs more than a
// tensor in memory to read them.
#pragma once

#include <string>
#include <vector>

#include "base/checked_files.h"
#include "model/stored_model.h"
#include "trainer/state_shard.h"

namespace leeway {

inline constexpr const char* kMomentsStem = "optimizer";

// A tensor's name in its file.
std::string stored_name(const LoraSettings* lora, StateKind kind, const std::string& parameter);

class SavedState {
 public:
  // Reads names and shapes. Throws Error, naming file and tensor, for what is missing or does not
  // belong to this model. What `model` is a view of must outlive it.
  SavedState(const std::string& folder, const StateModel& model);

  // Throws Error for numbers that are not finite, negative squares and bytes that cannot be read.
  // As a ReadState.
  void read(StateKind kind, const StatePiece& piece, std::span<float> to) const;
  // Reads all moments, a tensor at a time, for what `read` throws.
  void check_moments() const;
  // Where which tensor is: the same of folders with the same files.
  std::string layout_text() const;

 private:
  const StoredPlace& place_of(StateKind kind, const ParameterInfo& info) const;
  void check_stored_head() const;

  StateModel model_;
  StoredModel weights_, moments_;
};

}  // namespace leeway
