// The weights of a run's last step, and who has them: a snapshot, or the trainer alone where
// snapshots are rounded, since the device has no room for a copy with all digits.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "config/run_config.h"
#include "run/checkpoints.h"
#include "run/progress.h"
#include "run/trainer_learner.h"

namespace leeway {

// Used by one thread.
class LastWeights {
 public:
  // All of these must outlive this.
  LastWeights(const RunConfig& run, const CheckpointStore& checkpoints, Progress& progress)
      : run_(run), checkpoints_(checkpoints), progress_(progress) {}

  // Those of a step. A rounded snapshot is not kept, and the first one gets a note: what samples or
  // is written with fewer digits than the trainer has.
  void set(std::shared_ptr<const PolicySnapshot> weights);
  // With all digits; null: the trainer alone has them.
  const std::shared_ptr<const PolicySnapshot>& snapshot() const { return weights_; }
  // Where there is no snapshot: the trainer's weights, of the run's last step or of the one that
  // was trained beside its end; none where an update that failed has changed them, or where the
  // copy to the host fails, which is returned: why. `learner` must have ended
  // (TrainerLearner::end).
  std::optional<std::string> take_from(const Trainer& trainer, const TrainerLearner& learner);
  // A note where there are none, or they are not those of `step`, the run's last, with what is left
  // of the run; once no checkpoint is being written.
  void tell_what_is_written(int64_t step);

 private:
  void note_rounding();

  const RunConfig& run_;
  const CheckpointStore& checkpoints_;
  Progress& progress_;
  std::shared_ptr<const PolicySnapshot> weights_;
  bool told_of_rounding_ = false;
  std::string why_missing_;  // why nobody has those of the last step; empty: somebody has
};

}  // namespace leeway
