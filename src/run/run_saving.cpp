#include "run/run_saving.h"

#include <fmt/format.h>

#include "base/files.h"
#include "leeway/error.h"
#include "model/adapter_io.h"
#include "orchestrator/schedule_checks.h"
#include "orchestrator/schedule_state_json.h"
#include "run/policy_card.h"
#include "run/sft_phase.h"
#include "trainer/state_files.h"

namespace leeway {

RunSaving::RunSaving(const RunSetup& setup, const RunFiles& files, Progress& progress)
    : setup_(setup),
      files_(files),
      progress_(progress),
      checkpoints_(files.folder(), setup.config.run.checkpoint, files.identity()) {}

void RunSaving::save_checkpoint(int64_t step, const Trainer& trainer, const ScheduleState& schedule,
                                const RunState& state) {
  wait();
  writer_.start(fmt::format("checkpoint of step {}", step),
                [this, step, save = trainer.save_later(), schedule, state] {
                  write_checkpoint(step, save, schedule, state);
                });
}

// On the writer's thread: touches nothing that changes.
void RunSaving::write_checkpoint(int64_t step, const SaveState& save, const ScheduleState& schedule,
                                 const RunState& state) const {
  refuse_full_disk(files_.path("checkpoints"),
                   3 * sizeof(float) * static_cast<uint64_t>(setup_.weights.count()));
  files_.sync();
  checkpoints_.save(Phase::rl, step, [&](const std::string& folder) {
    FileSums sums = save(folder);
    sums["leeway.json"] = write_policy_card(folder, setup_.card);
    sums["schedule.json"] = write_file_atomically(
        folder + "/schedule.json", schedule_state_json(schedule, setup_.environment_ids));
    sums["run.json"] = write_file_atomically(folder + "/run.json", run_state_json(state));
    return sums;
  });
}

void RunSaving::save_weights_beside(int64_t step, std::shared_ptr<const PolicySnapshot> weights) {
  writer_.start(fmt::format("weights of step {}", step),
                [this, step, weights = std::move(weights)]() mutable {
                  const bool rounded = weights->is_rounded();
                  const std::shared_ptr<const Parameters> host = weights->shared_host();
                  weights.reset();  // a device's copy is not needed while the host's is written
                  files_.save_weights(*host, step, setup_, rounded);
                });
}

std::string RunSaving::save_weights(int64_t step, const Parameters& weights) const {
  return files_.save_weights(weights, step, setup_);
}

void RunSaving::tell_failures() {
  for (const std::string& failure : writer_.take_failures()) {
    progress_.note(
        fmt::format("warning: {}; {}, and the run goes on", failure, checkpoints_.what_stays()));
  }
}

void RunSaving::settle() { writer_.wait(); }

void RunSaving::wait() {
  settle();
  tell_failures();
}

bool RunSaving::has_reference() const {
  return setup_.config.loss_spec.reads(Stream::ref) &&
         setup_.config.run.trainer.reference == "initial";
}

void RunSaving::save_reference(const Trainer& trainer, RunState& state) const {
  if (!has_reference()) return;
  save_weights(0, trainer.parameters());
  state.initial_checksum = checksum(trainer.parameters());
}

Parameters RunSaving::reference(const Checkpoint& from, const RunState& state) const {
  if (!has_reference()) return load_like(setup_.weights, from.folder);
  const std::string folder = weights_folder(files_.folder(), 0);
  std::string problem = "its numbers are others";
  try {
    Parameters weights = load_like(setup_.weights, folder);
    if (checksum(weights) == state.initial_checksum) return weights;
  } catch (const Error& error) {
    problem = error.what();
  }
  throw Error(
      fmt::format("{}: is not the policy of step 0, which is the reference of this run; "
                  "put it back, or start a new run ({})",
                  folder, problem));
}

RunState read_run_state(const Checkpoint& checkpoint) {
  const std::string name = checkpoint.folder + "/run.json";
  return parse_run_state(name, read_file(name));
}

ScheduleState read_schedule(const RunSetup& setup, const Checkpoint& checkpoint,
                            int64_t vocabulary) {
  const std::string name = checkpoint.folder + "/schedule.json";
  ScheduleState state = parse_schedule_state(name, read_file(name), *setup.environments);
  check_schedule_state(name, state, setup.config.run.orchestrator, checkpoint.step, vocabulary);
  return state;
}

void check_checkpoint(const RunSetup& setup, const Checkpoint& checkpoint) {
  if (checkpoint.phase == Phase::sft) return check_sft_checkpoint(checkpoint, &setup.weights);
  read_run_state(checkpoint);
  const Parameters policy = check_state_like(setup.weights, checkpoint.folder);
  read_schedule(setup, checkpoint, policy.config().vocab_size);
}

}  // namespace leeway
