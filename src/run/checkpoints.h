// Checkpoints of a run, each complete or absent.
//
//   RUN/checkpoints/sft_N/     of the supervised training: files of the trainer, sft.json
//   RUN/checkpoints/step_N/    of RL: files of the trainer and the scheduler, run.json
//
// Each has a manifest.json with the length and CRC-32C of each file, and the identity of the run.
// A checkpoint is written under another name, synced and renamed, so that a folder `step_N` is
// complete unless someone damages it; then its manifest says so, and the one before is used. One of
// another run is not used either (run_identity.h).
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/checked_files.h"
#include "config/run_config.h"
#include "run/run_identity.h"

namespace leeway {

// A run goes through these in order; `leeway sft` has the first alone.
enum class Phase { sft, rl };

struct Checkpoint {
  Phase phase = Phase::rl;
  int64_t step = 0;
  std::string folder;

  bool before(const Checkpoint& other) const {
    return phase != other.phase ? phase < other.phase : step < other.step;
  }
  std::string name() const;  // "step 12", "supervised step 3"
};

// Takes over the id and the configuration that a checkpoint was written with, if it has them, for a
// folder whose identity.json is lost.
void adopt_identity(const Checkpoint& checkpoint, RunIdentity& identity);

class CheckpointStore {
 public:
  // Without an identity (folders written before identity.json existed) checkpoints are not compared
  // with one and carry none.
  CheckpointStore(const std::string& run_folder, const CheckpointTable& table,
                  std::optional<RunIdentity> identity = {});

  bool wanted(int64_t step) const;
  // `fill` writes the files into the folder it is given and returns the sums of what it wrote;
  // files that it leaves out are read once more. After the new checkpoint is there, older ones are
  // removed as [checkpoint] says; `keep_every` counts the steps of the phase under way. What a
  // killed process left half written is removed too: only one process writes a run. Nothing is
  // removed behind a `checkpoints` that is a symbolic link. Throws Error (a full disk); nothing is
  // lost then.
  void save(Phase phase, int64_t step,
            const std::function<FileSums(const std::string& folder)>& fill) const;

  // Whether there is any checkpoint, valid or not.
  bool any() const { return !all().empty(); }
  // For messages about what could not be written: what there is to continue from nevertheless.
  std::string what_stays() const {
    return any() ? "the last checkpoint stays" : "there is no checkpoint yet to continue from";
  }
  // The newest checkpoint that is complete, belongs to this run, and passes `check`; `notes` says
  // what was skipped and why. `check` throws Error.
  std::optional<Checkpoint> newest(std::vector<std::string>& notes,
                                   const std::function<void(const Checkpoint&)>& check = {}) const;
  std::vector<Checkpoint> all() const;  // oldest first, valid or not

 private:
  void remove_half_written() const;
  void remove_others(const Checkpoint& newest) const;
  bool is_link() const;

  std::string folder_;
  CheckpointTable table_;
  std::optional<RunIdentity> identity_;
};

}  // namespace leeway
