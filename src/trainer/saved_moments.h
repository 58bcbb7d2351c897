// The optimizer's moments on disk: `m.NAME` and `v.NAME` of each parameter, whole tensors, in
//
//   optimizer.safetensors                        by one process
//   optimizer-00001-of-00004.safetensors, ..     by ranks, each the tensors that it has most of
//   optimizer.safetensors.index.json             which tensor is in which of these
//
// Nobody needs more than a tensor of them in memory to read them.
#pragma once

#include <string>
#include <vector>

#include "base/checked_files.h"
#include "model/stored_model.h"
#include "trainer/moment_shard.h"

namespace leeway {

class SavedMoments {
 public:
  // Reads names and shapes. Throws Error, naming file and tensor, for what is missing or does not
  // belong to these parameters. `table` must outlive it.
  SavedMoments(const std::string& folder, const std::vector<ParameterInfo>& table);

  // Throws Error for numbers that are not finite, negative squares and bytes that cannot be read.
  // As a ReadMoment.
  void read(Moment which, const MomentPiece& piece, std::span<float> to) const;
  // Reads all of them, a tensor at a time, for what `read` throws.
  void check() const;
  // Where which tensor is: the same of folders with the same files.
  std::string layout_text() const;

 private:
  const std::vector<ParameterInfo>& table_;
  StoredModel files_;
};

std::string moment_name(Moment which, const ParameterInfo& info);  // "m.NAME", "v.NAME"

// The values of one parameter.
struct MomentsOfParameter {
  size_t parameter = 0;
  std::vector<float> first, second;
};

// Throws Error naming what is not finite.
void refuse_not_finite(const std::vector<ParameterInfo>& table, const MomentsOfParameter& moments);

// Removes files of moments that are not among `written`: those of an earlier save.
void remove_other_moments(const std::string& folder, const FileSums& written);

}  // namespace leeway
