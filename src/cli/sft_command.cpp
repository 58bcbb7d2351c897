#include "cli/commands.h"
#include "cli/config_options.h"
#include "cli/interrupt.h"
#include "cli/rank_group.h"
#include "cli/supervised_output.h"
#include "cli/terminal_progress.h"
#include "leeway/error.h"
#include "run/run_start.h"

namespace leeway {
namespace {

struct Options : ConfigSource {
  std::string resume;
  int64_t rank_count = 0;  // --ranks; 0: as a launcher says, or one
  bool json = false;
};

SupervisedSummary train(const Catalog& catalog, const Options& options) {
  TerminalProgress progress;
  Interrupt interrupt;
  const StopCondition should_stop = [&] { return interrupt.asked(); };
  if (!options.resume.empty()) {
    return resume_supervised_run(catalog, options.resume, options, progress, should_stop);
  }
  if (options.file.empty()) throw Error("sft: name a TOML file with an [sft] table");
  const Config config = load_config(catalog, options);
  if (!config.run.sft.enabled) throw Error(options.file + ": has no [sft] table");
  return run_supervised(config, catalog, options.ranks, progress, should_stop);
}

void run(Program& program, Options options) {
  reclaim_file(options);
  RankGroup group(options.rank_count);
  if (group.serves()) return group.serve(program.catalog);
  options.ranks = group.run();
  program.exit_code = show_summary(train(program.catalog, options), options.json);
}

}  // namespace

void add_sft(CLI::App& app, Program& program) {
  auto* command = app.add_subcommand(
      "sft",
      "Supervised fine-tuning as [sft] says: on sft.data, JSON lines with \"messages\" or "
      "\"prompt\"\n"
      "and \"completion\", or on demonstrations of the environments. The loss is on the\n"
      "assistant's tokens. Ctrl-C finishes the step and saves.");
  auto options = std::make_shared<Options>();
  add_config_options(*command, *options);
  command
      ->add_option("--resume", options->resume,
                   "A run folder of leeway sft: continues from its newest checkpoint")
      ->type_name("RUN");
  add_ranks_option(*command, options->rank_count);
  command->add_flag("--json", options->json, "Print the summary as JSON");
  command->callback([&program, options] { run(program, *options); });
}

}  // namespace leeway
