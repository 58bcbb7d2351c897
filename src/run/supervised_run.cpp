#include "run/supervised_run.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/files.h"
#include "base/json.h"
#include "leeway/error.h"
#include "run/environment_check.h"
#include "run/logged_progress.h"
#include "run/memory_check.h"
#include "run/policy_evaluation.h"
#include "run/run_ranks.h"
#include "run/sft_phase.h"

namespace leeway {
namespace {

constexpr const char* kObjective =
    "cross entropy on the tokens of the demonstrations, mean over tokens\n";

RunSetup setup_of(const Config& config, RunRanks* ranks) {
  const SftTable& table = config.run.sft;
  RunSetup setup(config, table.data.empty() || table.stop_at_reward > 0.0,
                 fits_memory({.job = Job::sft, .ranks = ranks_of(ranks)}));
  setup.ranks = ranks;
  return setup;
}

// Before training: a reward to stop at needs environments that work.
void check_reward(const RunSetup& setup) {
  if (setup.config.run.sft.stop_at_reward > 0.0) check_environments(*setup.environments);
}

// What a run works with.
struct Place {
  const RunSetup& setup;
  const Catalog& catalog;
  RunFiles& files;
  Progress& progress;
  const StopCondition& should_stop;
};

SupervisedSummary run(const Place& place, const std::optional<Checkpoint>& from,
                      const std::vector<std::string>& notes) {
  const RunSetup& setup = place.setup;
  RunFiles& files = place.files;
  const RunConfig& config = setup.config.run;
  LoggedProgress progress(place.progress, files);
  static_cast<void>(place.should_stop());  // from here on a stop is the run's to handle
  for (const std::string& note : notes) progress.note(note);
  if (from) progress.note(fmt::format("resumed from {}", from->name()));
  if (!files.moved().empty()) progress.note(files.moved());
  progress.note(fmt::format("run folder {}", files.folder()));
  if (setup.ranks != nullptr) progress.note(setup.ranks->line());
  const CheckpointStore checkpoints(files.folder(), config.checkpoint, files.identity());
  PolicyEvaluator evaluator(setup);
  const SftResult result =
      run_sft({setup, place.catalog, files, progress, place.should_stop, checkpoints, evaluator},
              from ? &*from : nullptr);
  SupervisedSummary summary;
  summary.end = !result.failure.empty() ? "gave_up" : result.stopped ? "stopped" : "finished";
  summary.reason = result.stopped ? "asked to" : result.failure;
  summary.folder = files.folder();
  summary.state = result.state;
  summary.weights = files.save_weights(result.weights, result.state.steps, setup);
  const RunEnd end{.end = summary.end,
                   .reason = summary.reason,
                   .steps = result.state.steps,
                   .max_steps = config.sft.max_steps,
                   .sft_steps = result.state.steps,
                   .sft_seconds = result.state.seconds,
                   .loss = result.state.loss};
  files.log(run_end_line(end));
  write_run_end(files.folder(), end);  // before the report, which shows it
  files.write_report();
  return summary;
}

}  // namespace

SupervisedSummary run_supervised(const Config& config, const Catalog& catalog, RunRanks* ranks,
                                 Progress& progress, const StopCondition& should_stop) {
  const RunSetup setup = setup_of(config, ranks);
  check_reward(setup);
  if (ranks != nullptr) ranks->begin(setup, catalog);
  RunFiles files(claim_folder(config.run.output_dir));
  files.begin(setup.config, kObjective, "sft");
  return run({setup, catalog, files, progress, should_stop}, std::nullopt, {});
}

SupervisedSummary resume_supervised(const Config& config, const Catalog& catalog, RunRanks* ranks,
                                    Resumption resumption, Progress& progress,
                                    const StopCondition& should_stop) {
  const int64_t max_steps = config.run.sft.max_steps;
  refuse_fewer_steps(resumption, "sft.max_steps", max_steps);
  if (has_finished(resumption, max_steps)) {
    for (const std::string& note : resumption.notes) progress.note(note);
    const RunEnd& end = *resumption.end;
    SupervisedSummary summary{.end = "finished", .folder = resumption.folder};
    summary.state.steps = end.steps;
    summary.state.seconds = end.sft_seconds;
    summary.state.loss = end.loss;
    summary.finished_before = true;
    const std::string weights = weights_folder(resumption.folder, end.steps);
    if (is_present(weights)) summary.weights = weights;
    return summary;
  }
  refuse_without_checkpoint(resumption);
  const RunSetup setup = setup_of(config, ranks);
  check_reward(setup);
  if (ranks != nullptr) ranks->begin(setup, catalog);
  const Checkpoint from = *resumption.from;
  const std::vector<std::string> notes = resumption.notes;
  RunFiles files(setup.config, kObjective, std::move(resumption));
  return run({setup, catalog, files, progress, should_stop}, from, notes);
}

std::string summary_json(const SupervisedSummary& summary) {
  const SftState& state = summary.state;
  JsonWriter writer;
  writer.begin_object().key("end").value(summary.end);
  if (!summary.reason.empty()) writer.key("reason").value(summary.reason);
  writer.key("run").value(summary.folder).key("weights").value(summary.weights);
  writer.key("steps").value(static_cast<double>(state.steps)).key("loss").value(state.loss);
  writer.key("trained_tokens").value(static_cast<double>(state.tokens));
  return writer.key("seconds").value(state.seconds).end_object().text() + "\n";
}

std::string summary_text(const SupervisedSummary& summary) {
  const SftState& state = summary.state;
  const std::string places =
      fmt::format("weights  {}\nreport   {}/report.html\n", summary.weights, summary.folder);
  if (summary.finished_before) return places;
  const double rate = static_cast<double>(state.tokens) / std::max(state.seconds, 1e-9);
  return fmt::format("{} steps, loss {:.4f}, {:.0f} tokens/s\n", state.steps, state.loss, rate) +
         places;
}

}  // namespace leeway
