#include "run/run_start.h"

#include <fmt/format.h>

#include <utility>

#include "leeway/error.h"
#include "run/checkpoints.h"
#include "run/from_run.h"
#include "run/memory_check.h"
#include "run/resumed_config.h"
#include "run/run_ranks.h"
#include "run/run_saving.h"
#include "run/sft_phase.h"
#include "run/training_run.h"

namespace leeway {
namespace {

ResumedConfig read_config(const Catalog& catalog, const std::string& folder,
                          const ConfigSource& source, Progress& progress) {
  ResumedConfig config = resumed_config(catalog, folder, source.file, source.sets, source.unsets);
  for (const std::string& note : config.now.notes) progress.note("leeway: note: " + note);
  return config;
}

Resumption look_at_supervised(const std::string& folder) {
  return look_at_run(folder, [](const Checkpoint& each) { check_sft_checkpoint(each); });
}

// Tells which numbers of steps are new.
void note_new_steps(const ResumedConfig& config, Resumption& resumption) {
  const RunConfig& run = config.now.run;
  const auto add = [&](const char* table, int64_t before, int64_t now, RateSchedule schedule) {
    if (before == now) return;
    std::string note = fmt::format("{}.max_steps is {} now, {} before", table, now, before);
    if (schedule != RateSchedule::constant) {
      note += fmt::format(
          "; {}.schedule = \"{}\" depends on it: from here on the learning rate follows the "
          "schedule "
          "to the new end",
          table, name_of(schedule));
    }
    resumption.notes.push_back(note);
  };
  add("trainer", config.max_steps_before, run.trainer.max_steps, run.trainer.optimizer.schedule);
  if (run.sft.enabled) {
    add("sft", config.sft_max_steps_before, run.sft.max_steps, run.sft.optimizer.schedule);
  }
}

}  // namespace

ResumedSummary resume_run(const Catalog& catalog, const std::string& folder,
                          const ConfigSource& source, Progress& progress,
                          const StopCondition& should_stop) {
  const ResumedConfig config = read_config(catalog, folder, source, progress);
  const RunConfig& run = config.now.run;
  const auto identity = read_identity(folder);
  if (identity && identity->job == "sft") {
    return resume_supervised(config.now, catalog, source.ranks, look_at_supervised(folder),
                             progress, should_stop);
  }
  // Whether they are whole is looked at below, once there is a model to compare them with.
  const std::vector<Checkpoint> checkpoints = CheckpointStore(folder, run.checkpoint).all();
  const bool sft_is_over = !checkpoints.empty() && checkpoints.back().phase == Phase::rl;
  RunSetup setup(config.now, true,
                 fits_memory({.spawn_servers = source.spawn_servers,
                              .ranks = ranks_of(source.ranks),
                              .sft_is_over = sft_is_over}));
  setup.spawn_servers = source.spawn_servers;
  setup.ranks = source.ranks;
  Resumption resumption =
      look_at_run(folder, [&](const Checkpoint& each) { check_checkpoint(setup, each); });
  refuse_fewer_steps(resumption, "trainer.max_steps", run.trainer.max_steps);
  if (has_finished(resumption, run.trainer.max_steps)) {
    for (const std::string& note : resumption.notes) progress.note(note);
    return finished_summary(resumption);
  }
  refuse_without_checkpoint(resumption);
  refuse_fewer_steps(resumption, "sft.max_steps", run.sft.max_steps);
  if (resumption.from->phase == Phase::rl && run.sft.max_steps != config.sft_max_steps_before) {
    throw Error(fmt::format("--resume {}: sft.max_steps = {}: the supervised training is over",
                            folder, run.sft.max_steps));
  }
  note_new_steps(config, resumption);
  return resume_training(setup, catalog, std::move(resumption), progress, should_stop);
}

SupervisedSummary resume_supervised_run(const Catalog& catalog, const std::string& folder,
                                        const ConfigSource& source, Progress& progress,
                                        const StopCondition& should_stop) {
  const ResumedConfig config = read_config(catalog, folder, source, progress);
  Resumption resumption = look_at_supervised(folder);
  if (!resumption.supervised()) {
    throw Error(fmt::format("--resume {}: is a run of leeway train; take leeway train --resume {}",
                            folder, folder));
  }
  return resume_supervised(config.now, catalog, source.ranks, std::move(resumption), progress,
                           should_stop);
}

RunSummary start_from_run(const Catalog& catalog, const StartingPoint& from,
                          const ConfigSource& source, Progress& progress,
                          const StopCondition& should_stop) {
  const RunOrigin origin = origin_of(from.folder, from.keep_optimizer);
  NewRun start{.notes = {}, .optimizer = origin.optimizer, .own_weights = true};
  RunSetup setup(
      config_from(catalog, origin, source.file, source.sets, source.unsets, start.notes), true,
      fits_memory({.spawn_servers = source.spawn_servers, .ranks = ranks_of(source.ranks)}));
  setup.spawn_servers = source.spawn_servers;
  setup.ranks = source.ranks;
  return run_training(setup, catalog, start, progress, should_stop);
}

}  // namespace leeway
