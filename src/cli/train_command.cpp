#include <fmt/format.h>

#include <cmath>
#include <filesystem>
#include <map>

#include "base/files.h"
#include "base/json.h"
#include "cli/commands.h"
#include "cli/output.h"
#include "cli/quick_start.h"
#include "cli/training_run.h"
#include "leeway/error.h"

namespace leeway {
namespace {

struct Options : ConfigOptions {
  std::string resume;
  bool json = false;
};

const char* name_of(RunSummary::End end) {
  switch (end) {
    case RunSummary::End::finished: return "finished";
    case RunSummary::End::stopped: return "stopped";
    case RunSummary::End::gave_up: return "gave_up";
  }
  return "";
}

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
  const auto metrics = [&](const char* key, const MetricList& list) {
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

std::string summary_text(const RunSummary& summary, bool quick_start) {
  std::string out;
  const auto estimate = [](const MetricList& list) {
    return fmt::format("{:.3f} [{:.3f}, {:.3f}]", metric_of(list, "eval/all/reward/mean"),
                       metric_of(list, "eval/all/reward/low"),
                       metric_of(list, "eval/all/reward/high"));
  };
  if (!summary.before.empty() && !summary.after.empty()) {
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
  out += fmt::format(
      "{} of {} steps, {} rollouts in {:.1f} s: sft {:.1f} s, rl {:.1f} s, eval "
      "{:.1f} s\n",
      summary.steps, summary.max_steps, summary.rollouts, summary.seconds, summary.sft_seconds,
      summary.rl_seconds, summary.eval_seconds);
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
  if (quick_start) {
    out +=
        "\nTry next:\n"
        "  leeway config --example > my.toml                           the configuration of this "
        "run\n"
        "  leeway train --set orchestrator.max_off_policy_steps=8      older rollouts\n"
        "  leeway train --set trainer.loss.preset=reinforce --set trainer.epochs=8   why "
        "corrections exist\n"
        "  leeway report runs/sort runs/sort-2                         two runs over each other\n"
        "  leeway sweep examples/02_off_policy/sweep.toml --dry-run    losses x seeds, as a "
        "table\n";
  }
  return out;
}

// Keys that a run may change when it goes on: what is trained does not depend on them.
bool may_change(const std::string& key) {
  for (const char* prefix :
       {"output.", "output_dir", "eval.", "checkpoint.", "trainer.threads", "rollout.threads",
        "rollout.kv_bytes", "orchestrator.rollout_timeout"}) {
    if (key.starts_with(prefix)) return true;
  }
  return false;
}

// Throws Error with the keys in which a configuration differs from that of the run it resumes.
void refuse_changes(const std::string& folder, const Config& saved, const Config& now) {
  std::map<std::string, std::pair<std::string, std::string>> values;  // before, now
  for (const EffectiveValue& value : saved.effective) values[value.key].first = value.value;
  for (const EffectiveValue& value : now.effective) values[value.key].second = value.value;
  std::vector<std::string> changed;
  for (const auto& [key, pair] : values) {
    if (pair.first == pair.second || may_change(key)) continue;
    changed.push_back(fmt::format("{}: {} in the run, {} now", key,
                                  pair.first.empty() ? "absent" : pair.first,
                                  pair.second.empty() ? "absent" : pair.second));
  }
  if (changed.empty()) return;
  throw Error(
      fmt::format("--resume {}: the configuration differs from the run's:\n  {}\nA run goes on as "
                  "it began; start "
                  "a new one for other settings",
                  folder, fmt::join(changed, "\n  ")));
}

RunSummary resume(Program& program, const Options& options) {
  const std::string saved_name = options.resume + "/config.toml";
  if (!std::filesystem::exists(saved_name)) {
    throw Error(fmt::format("--resume {}: there is no {}; name the folder of a run", options.resume,
                            saved_name));
  }
  const std::string saved_text = read_file(saved_name);
  const Config saved =
      parse_config(program.catalog, saved_name, saved_text, {}, ConfigScope::whole);
  const std::string name = options.file.empty() ? saved_name : options.file;
  const Config now =
      parse_config(program.catalog, name, options.file.empty() ? saved_text : read_file(name),
                   options.sets, ConfigScope::whole);
  refuse_changes(options.resume, saved, now);
  const RunSetup setup(now);
  return run_training(setup, program.catalog, options.resume);
}

RunSummary start(Program& program, const Options& options) {
  const bool quick_start = options.file.empty();
  const std::string text =
      quick_start ? std::string(quick_start_config()) : read_file(options.file);
  const RunSetup setup(parse_config(program.catalog, quick_start ? kQuickStartName : options.file,
                                    text, options.sets, ConfigScope::whole));
  return run_training(setup, program.catalog);
}

void run(Program& program, Options options) {
  reclaim_positional(options.sets, options.file);
  const bool quick_start = options.file.empty() && options.resume.empty();
  const RunSummary summary =
      options.resume.empty() ? start(program, options) : resume(program, options);
  if (summary.end == RunSummary::End::gave_up) {
    say(fmt::format("leeway: the run gave up: {}", summary.reason));
    program.exit_code = 3;
  }
  if (summary.finished_before) {
    say(fmt::format("{}: the run has finished, all of its {} steps; nothing is done",
                    summary.folder, summary.steps));
  }
  print(options.json ? summary_json(summary) : summary_text(summary, quick_start));
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
  command->add_flag("--json", options->json, "Print the summary as JSON");
  command->callback([&program, options] { run(program, *options); });
}

}  // namespace leeway
