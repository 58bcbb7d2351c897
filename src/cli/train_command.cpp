#include <fmt/format.h>

#include <cmath>
#include <optional>

#include "base/files.h"
#include "base/json.h"
#include "cli/commands.h"
#include "cli/config_options.h"
#include "leeway/error.h"
#include "run/durations.h"
#include "run/from_run.h"
#include "run/output.h"
#include "run/resume_hint.h"
#include "run/resumed_config.h"
#include "run/sft_phase.h"
#include "run/supervised_run.h"
#include "run/training_run.h"

namespace leeway {
namespace {

struct Options : ConfigOptions {
  std::string resume, from;
  bool keep_optimizer = false;
  bool json = false;
};

std::string summary_json(const RunSummary& summary) {
  JsonWriter json;
  json.begin_object().key("end").value(name_of(summary.end));
  if (!summary.reason.empty()) json.key("reason").value(summary.reason);
  json.key("run").value(summary.folder).key("weights").value(summary.weights);
  json.key("report").value(summary.folder + "/report.html");
  const auto number = [&](const char* key, auto value) {
    json.key(key).value(static_cast<double>(value));
  };
  number("steps", summary.steps);
  number("sft_steps", summary.sft_steps);
  number("seconds", summary.seconds);
  number("sft_seconds", summary.sft_seconds);
  number("rl_seconds", summary.rl_seconds);
  number("eval_seconds", summary.eval_seconds);
  number("rollouts", summary.rollouts);
  number("sampled_tokens", summary.sampled_tokens);
  number("trained_tokens", summary.trained_tokens);
  number("sampler_busy", summary.sampler_busy);
  number("trainer_busy", summary.trainer_busy);
  const auto metrics = [&](const char* key, const Metrics& list) {
    json.key(key).begin_object();
    for (const auto& [name, value] : list) json.key(name).value(value);
    json.end_object();
  };
  const ScheduleTotals& totals = summary.totals;
  json.key("account").begin_object();
  number("admitted", totals.admitted);
  number("trained", totals.batched - totals.filtered);
  number("filtered", totals.filtered);
  number("stale", totals.stale);
  number("dropped", totals.dropped);
  number("waiting", totals.completed - totals.batched - totals.stale - totals.dropped);
  number("failed", totals.failed);
  number("cancelled", totals.cancelled);
  number("running", summary.running);
  json.end_object();
  metrics("before", summary.before);
  metrics("after", summary.after);
  return json.end_object().text() + "\n";
}

// What to do after the quick start. The commands work as they stand, one after the other: each run
// has a name of its own.
std::string suggestions(const std::string& folder) {
  const std::string run = shell_word(folder), stale = shell_word(folder + "-stale");
  const std::string sweep = "examples/02_off_policy/sweep.toml";
  std::vector<std::pair<std::string, std::string>> lines = {
      {"config --example > my.toml", "the configuration of this run"},
      {fmt::format("train --set output_dir={} --set orchestrator.max_off_policy_steps=8", stale),
       "older rollouts"},
      {fmt::format("report {} {}", run, stale), "both runs over each other"},
      {fmt::format("train --set output_dir={} --set trainer.loss.preset=reinforce --set "
                   "trainer.epochs=8",
                   shell_word(folder + "-reused")),
       "why corrections exist"},
      {"help train", "what else there is"},
  };
  if (is_present(sweep)) {
    lines.emplace_back(fmt::format("sweep {} --dry-run", sweep), "losses x seeds, as a table");
  }
  std::string out = "\nTry next:\n";
  for (const auto& [command, what] : lines) {
    out += fmt::format("  leeway {:<72}   {}\n", command, what);
  }
  return out;
}

std::string summary_text(const RunSummary& summary, bool quick_start) {
  std::string out;
  const auto estimate = [](const Metrics& list) {
    return fmt::format("{:.3f} [{:.3f}, {:.3f}]", metric_of(list, "eval/all/reward/mean"),
                       metric_of(list, "eval/all/reward/low"),
                       metric_of(list, "eval/all/reward/high"));
  };
  const auto measured = [](const Metrics& list) {
    return !std::isnan(metric_of(list, "eval/all/reward/mean"));
  };
  if (measured(summary.before) && measured(summary.after)) {
    out += fmt::format("held-out reward  {} before, {} after", estimate(summary.before),
                       estimate(summary.after));
    const double before = metric_of(summary.before, "eval/all/greedy/mean");
    if (!std::isnan(before)) {
      out += fmt::format("; greedy {:.3f} before, {:.3f} after", before,
                         metric_of(summary.after, "eval/all/greedy/mean"));
    }
    out += "\n";
  }
  if (summary.finished_before) {
    return out +
           fmt::format("weights  {}\nreport   {}/report.html\n", summary.weights, summary.folder);
  }
  const double rl = std::max(summary.rl_seconds, 1e-9);
  out += fmt::format("{} of {} steps, {} rollouts in {}: sft {}, rl {}, eval {}\n", summary.steps,
                     summary.max_steps, summary.rollouts, duration_text(summary.seconds),
                     duration_text(summary.sft_seconds), duration_text(summary.rl_seconds),
                     duration_text(summary.eval_seconds));
  out += fmt::format(
      "rl: {:.0f} sampled and {:.0f} trained tokens/s; sampler busy {:.0f} %, trainer {:.0f} %\n",
      static_cast<double>(summary.sampled_tokens) / rl,
      static_cast<double>(summary.trained_tokens) / rl, 100 * summary.sampler_busy,
      100 * summary.trainer_busy);
  const ScheduleTotals& totals = summary.totals;
  if (totals.failed + totals.cancelled + totals.stale + totals.dropped > 0) {
    out += fmt::format(
        "rollouts: {} admitted = {} trained + {} filtered + {} stale + {} dropped with their group "
        "+ "
        "{} failed + {} cancelled + {} left over\n",
        totals.admitted, totals.batched - totals.filtered, totals.filtered, totals.stale,
        totals.dropped, totals.failed, totals.cancelled,
        totals.completed - totals.batched - totals.stale - totals.dropped + summary.running);
  }
  if (!summary.weights.empty()) out += fmt::format("weights  {}\n", summary.weights);
  out += fmt::format("report   {}/report.html\n", summary.folder);
  if (quick_start) out += suggestions(summary.folder);
  return out;
}

// What is said of settings that are new.
void note_new_steps(const ResumedConfig& config, Resumption& resumption) {
  const RunConfig& run = config.now.run;
  const auto add = [&](const char* table, int64_t before, int64_t now, RateSchedule schedule) {
    if (before == now) return;
    std::string note = fmt::format("{}.max_steps is {} now, {} before", table, now, before);
    if (schedule != RateSchedule::constant) {
      note += fmt::format(
          "; {}.schedule = \"{}\" ends with it: from here on the learning rate follows the course "
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

// Nothing: it was a run of `leeway sft`, and everything has been told.
std::optional<RunSummary> resume(Program& program, const Options& options) {
  const ResumedConfig config =
      resumed_config(program.catalog, options.resume, options.file, options.sets, options.unsets);
  say_notes(config.now);
  const RunConfig& run = config.now.run;
  const auto identity = read_identity(options.resume);
  if (identity && identity->job == "sft") {
    Resumption supervised = look_at_run(options.resume, check_sft_checkpoint);
    program.exit_code =
        tell(resume_supervised(config.now, program.catalog, std::move(supervised)), options.json);
    return std::nullopt;
  }
  const RunSetup setup(config.now);
  Resumption resumption =
      look_at_run(options.resume, [&](const Checkpoint& each) { check_checkpoint(setup, each); });
  refuse_fewer_steps(resumption, "trainer.max_steps", run.trainer.max_steps);
  if (has_finished(resumption, run.trainer.max_steps)) {
    for (const std::string& note : resumption.notes) say(note);
    return finished_summary(resumption);
  }
  refuse_without_checkpoint(resumption);
  refuse_fewer_steps(resumption, "sft.max_steps", run.sft.max_steps);
  if (resumption.from->phase == Phase::rl && run.sft.max_steps != config.sft_max_steps_before) {
    throw Error(fmt::format("--resume {}: sft.max_steps = {}: the supervised training is over",
                            options.resume, run.sft.max_steps));
  }
  note_new_steps(config, resumption);
  return resume_training(setup, program.catalog, std::move(resumption));
}

RunSummary start_from(Program& program, const Options& options) {
  const RunOrigin origin = origin_of(options.from, options.keep_optimizer);
  NewRun start{.optimizer = origin.optimizer, .own_weights = true};
  RunSetup setup(config_from(program.catalog, origin, options.file, options.sets, options.unsets,
                             start.notes));
  return run_training(setup, program.catalog, start);
}

RunSummary start(Program& program, const Options& options) {
  RunSetup setup(load_config(program.catalog, options));
  return run_training(setup, program.catalog, {});
}

void run(Program& program, Options options) {
  reclaim_file(options);
  if (options.keep_optimizer && options.from.empty()) {
    throw Error("--keep-optimizer: goes with --from RUN, whose moments it keeps");
  }
  const bool quick_start = options.file.empty() && options.resume.empty() && options.from.empty();
  const std::optional<RunSummary> done = !options.resume.empty() ? resume(program, options)
                                         : !options.from.empty() ? start_from(program, options)
                                                                 : start(program, options);
  if (!done) return;
  const RunSummary& summary = *done;
  if (summary.end == RunSummary::End::gave_up) {
    say(fmt::format("leeway: the run gave up: {}", summary.reason));
    program.exit_code = 3;
  }
  if (summary.end == RunSummary::End::stopped) {
    say(fmt::format("leeway: the run was stopped after {} of {} steps: {}", summary.steps,
                    summary.max_steps, summary.reason));
  }
  if (summary.finished_before) {
    say(
        fmt::format("{}: the run has finished, all of its {} steps; nothing is done. For more of "
                    "them: --set trainer.max_steps=N; for other settings: leeway train --from {}",
                    summary.folder, summary.steps, summary.folder));
  }
  print(options.json ? summary_json(summary) : summary_text(summary, quick_start));
  if (summary.end != RunSummary::End::finished) say_how_to_resume(summary.folder);
}

}  // namespace

void add_train(CLI::App& app, Program& program) {
  auto* command = app.add_subcommand(
      "train",
      "Trains a policy by reinforcement learning. Without a file: the quick start, in which a\n"
      "small model learns to sort letters. Sampling and training overlap; rollouts are at most\n"
      "orchestrator.max_off_policy_steps versions old. Ctrl-C finishes the step and saves.");
  auto options = std::make_shared<Options>();
  add_config_options(*command, *options);
  command
      ->add_option("--resume", options->resume,
                   "A run folder: goes on from its newest checkpoint, with its configuration")
      ->type_name("RUN");
  command
      ->add_option("--from", options->from,
                   "A run folder: a new run that starts with its last weights, with CONFIG or\n"
                   "with its configuration; [sft] is not repeated")
      ->type_name("RUN")
      ->excludes("--resume");
  command->add_flag("--keep-optimizer", options->keep_optimizer,
                    "With --from: start with its optimizer's moments, too");
  command->add_flag("--json", options->json, "Print the summary as JSON");
  command->callback([&program, options] { run(program, *options); });
}

}  // namespace leeway
