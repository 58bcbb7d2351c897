#include "run/supervised_run.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/files.h"
#include "base/json.h"
#include "leeway/error.h"
#include "run/environment_check.h"
#include "run/output.h"
#include "run/resume_hint.h"
#include "run/sft_phase.h"

namespace leeway {
namespace {

constexpr const char* kObjective =
    "cross entropy on the tokens of the demonstrations, mean over tokens\n";

RunSetup setup_of(const Config& config) {
  const SftTable& table = config.run.sft;
  return RunSetup(config, table.data.empty() || table.stop_at_reward > 0.0);
}

// Before anything is trained: a reward to stop at needs environments that work.
void check_reward(const RunSetup& setup) {
  if (setup.config.run.sft.stop_at_reward > 0.0) check_environments(*setup.environments);
}

SupervisedSummary run(const RunSetup& setup, const Catalog& catalog, RunFiles& files,
                      const std::optional<Checkpoint>& from,
                      const std::vector<std::string>& notes) {
  const RunConfig& config = setup.config.run;
  RunProgress progress(&files);
  const Interrupt interrupt;
  for (const std::string& note : notes) progress.note(note);
  if (from) progress.note(fmt::format("resumed from {}", from->name()));
  if (!files.moved().empty()) progress.note(files.moved());
  progress.note(fmt::format("run folder {}", files.folder()));
  const CheckpointStore checkpoints(files.folder(), config.checkpoint, files.identity());
  const SftResult result =
      run_sft({setup, catalog, files, progress, interrupt, checkpoints}, from ? &*from : nullptr);
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
  write_run_end(files.folder(), end);  // before the report, which tells it
  files.write_report();
  return summary;
}

}  // namespace

SupervisedSummary run_supervised(const Config& config, const Catalog& catalog) {
  const RunSetup setup = setup_of(config);
  check_reward(setup);
  RunFiles files(claim_folder(config.run.output_dir));
  files.begin(setup.config, kObjective, "sft");
  return run(setup, catalog, files, std::nullopt, {});
}

SupervisedSummary resume_supervised(const Config& config, const Catalog& catalog,
                                    Resumption resumption) {
  const int64_t max_steps = config.run.sft.max_steps;
  refuse_fewer_steps(resumption, "sft.max_steps", max_steps);
  if (has_finished(resumption, max_steps)) {
    for (const std::string& note : resumption.notes) say(note);
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
  const RunSetup setup = setup_of(config);
  check_reward(setup);
  const Checkpoint from = *resumption.from;
  const std::vector<std::string> notes = resumption.notes;
  RunFiles files(setup.config, kObjective, std::move(resumption));
  return run(setup, catalog, files, from, notes);
}

int tell(const SupervisedSummary& summary, bool json) {
  if (summary.end == "gave_up") say("leeway: the run gave up: " + summary.reason);
  if (summary.finished_before) {
    say(
        fmt::format("{}: the supervised training has finished, {} steps; nothing is done. For RL "
                    "from its weights: leeway train --from {}",
                    summary.folder, summary.state.steps, summary.folder));
  }
  const SftState& state = summary.state;
  if (json) {
    JsonWriter writer;
    writer.begin_object().key("end").value(summary.end);
    if (!summary.reason.empty()) writer.key("reason").value(summary.reason);
    writer.key("run").value(summary.folder).key("weights").value(summary.weights);
    writer.key("steps").value(static_cast<double>(state.steps)).key("loss").value(state.loss);
    writer.key("trained_tokens").value(static_cast<double>(state.tokens));
    print(writer.key("seconds").value(state.seconds).end_object().text() + "\n");
  } else if (summary.finished_before) {
    print(fmt::format("weights  {}\nreport   {}/report.html\n", summary.weights, summary.folder));
  } else {
    const double rate = static_cast<double>(state.tokens) / std::max(state.seconds, 1e-9);
    print(fmt::format(
        "{} steps, loss {:.4f}, {:.0f} tokens/s\nweights  {}\nreport   {}/report.html\n",
        state.steps, state.loss, rate, summary.weights, summary.folder));
  }
  if (summary.end != "finished") say_how_to_resume(summary.folder);
  return summary.end == "gave_up" ? 3 : 0;
}

}  // namespace leeway
