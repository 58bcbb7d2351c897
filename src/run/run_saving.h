// What a training run saves and how it is read back: checkpoints, folders of weights, and the
// reference policy.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "orchestrator/scheduler.h"
#include "run/background_writer.h"
#include "run/checkpoints.h"
#include "run/progress.h"
#include "run/run_files.h"
#include "run/run_setup.h"
#include "run/run_state.h"
#include "trainer/trainer.h"

namespace leeway {

// Not thread-safe; most files are written on another thread in the background of training. A write
// failure there is reported as a note; what was written before stays, and the run continues.
class RunSaving {
 public:
  // All of these must outlive this.
  RunSaving(const RunSetup& setup, const RunFiles& files, Progress& progress);

  const CheckpointStore& checkpoints() const { return checkpoints_; }

  // Waits for what is still being written, copies the state where it is, and writes it in the
  // background. The trainer must live until `wait`.
  void save_checkpoint(int64_t step, const Trainer& trainer, const ScheduleState& schedule,
                       const RunState& state);
  // To weights/step_N, in the background.
  void save_weights_beside(int64_t step, std::shared_ptr<const PolicySnapshot> weights);
  // The same at once; the folder. Throws Error.
  std::string save_weights(int64_t step, const Parameters& weights) const;
  // Reports what could not be written so far.
  void tell_failures();
  // Waits for what is being written.
  void settle();
  // Does both.
  void wait();

  // The trainer's policy at step 0, which is the reference of a loss that has one with
  // trainer.reference = "initial". It is saved once, not in every checkpoint; `state` keeps its
  // checksum.
  void save_reference(const Trainer& trainer, RunState& state) const;
  // What the trainer of a run that goes on from `from` is made with: the reference where there is
  // one, else the checkpoint's weights. Throws Error if it is not the policy it was.
  Parameters reference(const Checkpoint& from, const RunState& state) const;

 private:
  bool has_reference() const;
  using SaveState = std::function<FileSums(const std::string& folder)>;
  void write_checkpoint(int64_t step, const SaveState& save, const ScheduleState& schedule,
                        const RunState& state) const;

  const RunSetup& setup_;
  const RunFiles& files_;
  Progress& progress_;
  CheckpointStore checkpoints_;
  BackgroundWriter writer_;
};

// Of a checkpoint of RL. Throws Error: a file that is damaged, or of another configuration.
RunState read_run_state(const Checkpoint& checkpoint);
ScheduleState read_schedule(const RunSetup& setup, const Checkpoint& checkpoint,
                            int64_t vocabulary);

// Throws Error if a run cannot continue from a checkpoint although its checksums match.
void check_checkpoint(const RunSetup& setup, const Checkpoint& checkpoint);

}  // namespace leeway
