#include <fmt/format.h>

#include <algorithm>
#include <variant>

#include "base/files.h"
#include "cli/commands.h"
#include "cli/config_options.h"
#include "cli/interrupt.h"
#include "cli/output.h"
#include "cli/rank_group.h"
#include "cli/supervised_output.h"
#include "cli/terminal_progress.h"
#include "leeway/error.h"
#include "model/adapter_io.h"
#include "run/memory_check.h"
#include "run/resume_hint.h"
#include "run/run_ranks.h"
#include "run/run_start.h"
#include "run/training_plan.h"
#include "run/training_run.h"

namespace leeway {
namespace {

struct Options : ConfigSource {
  std::string resume, from;
  int64_t rank_count = 0;  // --ranks; 0: as a launcher says, or one
  bool keep_optimizer = false;
  bool json = false, dry_run = false;
};

// Suggestions after the quick start. The commands work as printed, one after the other: each run
// has its own name, and the settings of this one where the suggestion has no others.
std::string suggestions(const std::string& folder, const ConfigSource& source) {
  const std::string run = shell_word(folder), stale = shell_word(folder + "-stale");
  const std::string sweep = "examples/02_off_policy/sweep.toml",
                    lag = "orchestrator.max_off_policy_steps";
  // `without`: keys, and tables with a dot at their end.
  const auto train_to = [&](const std::string& name, std::vector<std::string> without) {
    std::string command = "leeway train --set output_dir=" + shell_word(name);
    without.emplace_back("output_dir");
    for (const std::string& set : source.sets) {
      const std::string key = parse_assignment(set).key;
      const bool is_other = std::ranges::any_of(without, [&](const std::string& left_out) {
        return key == left_out || (left_out.ends_with('.') && key.starts_with(left_out));
      });
      if (!is_other) command += " --set " + shell_word(set);
    }
    for (const std::string& unset : source.unsets) command += " --unset " + shell_word(unset);
    return command;
  };
  std::vector<std::pair<std::string, std::string>> lines = {
      {fmt::format("cp {} my.toml", shell_word(folder + "/config.toml")),
       "the configuration of this run, to change"}};
  const bool has_lag = std::ranges::any_of(
      source.sets, [&](const std::string& set) { return parse_assignment(set).key == lag; });
  if (!has_lag) {
    lines.emplace_back(train_to(folder + "-stale", {}) + " --set " + lag + "=8", "older rollouts");
    lines.emplace_back(fmt::format("leeway report {} {}", run, stale), "both runs in one report");
  }
  // What `reinforce` does not read may not be set.
  lines.emplace_back(
      train_to(folder + "-reused", {"trainer.loss.", "trainer.epochs", "trainer.prox_forward",
                                    "trainer.reference", "trainer.teacher"}) +
          " --set trainer.loss.preset=reinforce --set trainer.epochs=8",
      "why corrections exist");
  lines.emplace_back("leeway help train", "what else there is");
  if (is_present(sweep)) {
    lines.emplace_back(fmt::format("leeway sweep {} --dry-run", sweep),
                       "losses x seeds, as a table");
  }
  std::string out = "\nTry next:";
  for (const auto& [command, what] : lines) out += fmt::format("\n  {:<79}   {}", command, what);
  return out;
}

// An adapter over another folder than the one it names, without a checksum that would tell.
void warn_of_other_base(const RunSetup& setup) {
  const ModelTable& model = setup.config.run.model;
  const std::string warning = other_base_warning(model.lora.path, model.path);
  if (!warning.empty()) warn(warning);
}

// Everything up to the first sampled token, without a run folder.
void plan(const Catalog& catalog, const Options& options) {
  if (!options.resume.empty() || !options.from.empty()) {
    throw Error("--dry-run: checks a configuration alone; leave --resume and --from out");
  }
  const MemoryOfJob job{.spawn_servers = options.spawn_servers,
                        .ranks = std::max<int64_t>(1, options.rank_count)};
  RunSetup setup(load_config(catalog, options), true, fits_memory(job));
  check_ranks(static_cast<int>(job.ranks), setup.config.run);
  setup.spawn_servers = options.spawn_servers;
  warn_of_other_base(setup);
  for (const std::string& note : check_training(setup)) say(note);
  print(options.json ? training_plan_json(setup, job) : training_plan_text(setup, job));
}

ResumedSummary train(const Catalog& catalog, const Options& options) {
  TerminalProgress progress;
  Interrupt interrupt;
  const StopCondition should_stop = [&] { return interrupt.asked(); };
  if (!options.resume.empty()) {
    return resume_run(catalog, options.resume, options, progress, should_stop);
  }
  if (!options.from.empty()) {
    return start_from_run(catalog, {options.from, options.keep_optimizer}, options, progress,
                          should_stop);
  }
  RunSetup setup(
      load_config(catalog, options), true,
      fits_memory({.spawn_servers = options.spawn_servers, .ranks = ranks_of(options.ranks)}));
  warn_of_other_base(setup);
  setup.spawn_servers = options.spawn_servers;
  setup.ranks = options.ranks;
  return run_training(setup, catalog, {}, progress, should_stop);
}

void show(Program& program, const RunSummary& summary, const Options& options) {
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
  const bool quick_start = options.file.empty() && options.resume.empty() && options.from.empty();
  print(options.json ? summary_json(summary) : summary_text(summary));
  if (quick_start && !options.json) say(suggestions(summary.folder, options));
  if (summary.end == RunSummary::End::finished) return;
  if (const std::string hint = resume_hint(summary.folder); !hint.empty()) say(hint);
}

void run(Program& program, Options options) {
  reclaim_file(options);
  if (options.keep_optimizer && options.from.empty()) {
    throw Error("--keep-optimizer: needs --from RUN, whose optimizer moments it keeps");
  }
  if (options.dry_run) return plan(program.catalog, options);
  RankGroup group(options.rank_count);
  if (group.serves()) return group.serve(program.catalog);
  options.ranks = group.run();
  const ResumedSummary done = train(program.catalog, options);
  if (const auto* summary = std::get_if<RunSummary>(&done)) {
    show(program, *summary, options);
  } else {
    program.exit_code = show_summary(std::get<SupervisedSummary>(done), options.json);
  }
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
                   "A run folder: continues from its newest checkpoint, with its configuration")
      ->type_name("RUN");
  command
      ->add_option("--from", options->from,
                   "A run folder: a new run that starts with its last weights, with CONFIG or\n"
                   "with its configuration; [sft] is not repeated")
      ->type_name("RUN")
      ->excludes("--resume");
  command->add_flag("--keep-optimizer", options->keep_optimizer,
                    "With --from: also start with its optimizer moments");
  command
      ->add_option(
          "--spawn-servers", options->spawn_servers,
          "Start this many `leeway serve` processes on this machine, which sample for the\n"
          "run and end with it")
      ->type_name("N")
      ->check(CLI::Range(1, 64));
  add_ranks_option(*command, options->rank_count);
  command->add_flag("--dry-run", options->dry_run,
                    "Check everything up to the first sampled token (files, tokenizer, memory,\n"
                    "environments), print what the run would do, and write nothing");
  command->add_flag("--json", options->json, "Print the summary as JSON");
  command->callback([&program, options] { run(program, *options); });
}

}  // namespace leeway
