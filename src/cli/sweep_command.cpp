#include <fmt/format.h>

#include <memory>
#include <thread>

#include "cli/commands.h"
#include "cli/output.h"
#include "cli/sweep_signals.h"
#include "cli/terminal_progress.h"
#include "leeway/error.h"
#include "sweep/sweep.h"
#include "sweep/sweep_tables.h"

namespace leeway {
namespace {

struct Options {
  std::string file;
  std::vector<std::string> only;
  int jobs = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  bool json = false, markdown = false, dry_run = false;
};

// `--only a b SWEEP.toml`: the option takes every word after it. Names have no dot, files do.
void reclaim_file(Options& options) {
  for (auto word = options.only.begin(); word != options.only.end(); ++word) {
    if (!options.file.empty() || word->find('.') == std::string::npos) continue;
    options.file = *word;
    options.only.erase(word);
    break;
  }
  if (options.file.empty())
    throw Error("sweep: give the sweep file, as in leeway sweep SWEEP.toml");
}

SweepResult run_all(const SweepPlan& plan, int jobs) {
  TerminalProgress progress;
  const SweepSignals signals;
  return run_sweep(plan, jobs,
                   {progress, [&] { return signals.wait(); }, [&] { signals.restore(); }});
}

SweepPlan make_plan(const Catalog& catalog, const Options& options) {
  TerminalProgress progress;
  return plan_sweep(catalog, options.file, options.only, progress);
}

void run(Program& program, Options options) {
  reclaim_file(options);
  const SweepPlan plan = make_plan(program.catalog, options);
  if (options.dry_run) return print(sweep_plan_text(plan, options.json));
  const SweepResult result = run_all(plan, options.jobs);
  if (result.interrupted) {
    say("leeway: stopped; the same command runs what is not finished");
    program.exit_code = 130;
    return;
  }
  const std::optional<std::string> report = write_sweep_report(plan, result);
  const std::string shown = options.json ? sweep_json(plan, result, report)
                                         : sweep_tables(plan, result, options.markdown);
  std::string failed;
  for (size_t k = 0; k < plan.runs.size(); ++k) {
    if (result.failures[k].empty()) continue;
    failed += fmt::format("\n  {}: {}", plan.runs[k].name, result.failures[k]);
  }
  if (!failed.empty()) {
    say(fmt::format("leeway: runs that failed; {}/TABLE/ROW/seed_N.log has more:{}",
                    plan.config.output_dir, failed));
    program.exit_code = 3;
  }
  if (report && !options.json) say("report   " + *report);
  print(shown);
}

}  // namespace

void add_sweep(CLI::App& app, Program& program) {
  auto* command = app.add_subcommand(
      "sweep",
      "Trains every row of every table of a sweep file with every seed, in parallel processes,\n"
      "and prints the tables. Run again, it continues with what is not finished.");
  auto options = std::make_shared<Options>();
  command
      ->add_option("sweep", options->file, "A TOML file, such as examples/02_off_policy/sweep.toml")
      ->type_name("SWEEP.toml");
  command
      ->add_option("--jobs", options->jobs,
                   "Runs at a time; default: the number of cores. With more than one, each run\n"
                   "samples and trains on one thread, unless the files say otherwise")
      ->check(CLI::Range(1, 4096));
  command->add_option("--only", options->only, "Tables, rows or TABLE/ROW to run; default: all")
      ->type_name("NAME");
  auto* json =
      command->add_flag("--json", options->json, "Print all numbers, those of each seed too");
  auto* dry_run = command->add_flag("--dry-run", options->dry_run,
                                    "Check every run and list them; write nothing");
  command->add_flag("--markdown", options->markdown, "Print the tables as Markdown")
      ->excludes(json)
      ->excludes(dry_run);
  command->callback([&program, options] { run(program, *options); });
}

}  // namespace leeway
