// Checkpoints of a run: whole or not there.
//
//   RUN/checkpoints/step_N/    files of the trainer and the scheduler, and manifest.json with the
//                              length and CRC-32C of each
//
// A checkpoint is written under another name, synced and renamed, so that a folder `step_N` is
// complete unless someone damages it; then its manifest says so, and the one before is used.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "config/run_config.h"

namespace leeway {

struct Checkpoint {
  int64_t step = 0;
  std::string folder;
};

class CheckpointStore {
 public:
  CheckpointStore(const std::string& run_folder, const CheckpointTable& table);

  bool wanted(int64_t step) const;
  // `fill` writes the files into the folder it is given. After the new checkpoint is there, older
  // ones are removed as [checkpoint] says, and all of later steps. What a killed process left half
  // written goes, too: one process writes a run. Throws Error (a full disk); nothing is lost then.
  void save(int64_t step, const std::function<void(const std::string& folder)>& fill) const;

  // The newest checkpoint that is whole; `notes` says what was passed over and why.
  std::optional<Checkpoint> newest(std::vector<std::string>& notes) const;

 private:
  std::vector<Checkpoint> all() const;  // oldest first
  void remove_half_written() const;
  void remove_others(int64_t newest) const;

  std::string folder_;
  CheckpointTable table_;
};

}  // namespace leeway
