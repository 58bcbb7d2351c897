#include <fmt/format.h>

#include "cli/commands.h"
#include "cli/config_options.h"
#include "leeway/error.h"
#include "run/output.h"
#include "run/resumed_config.h"
#include "run/sft_phase.h"
#include "run/supervised_run.h"

namespace leeway {
namespace {

struct Options : ConfigOptions {
  std::string resume;
  bool json = false;
};

SupervisedSummary resume(Program& program, const Options& options) {
  const ResumedConfig config =
      resumed_config(program.catalog, options.resume, options.file, options.sets, options.unsets);
  say_notes(config.now);
  Resumption resumption = look_at_run(options.resume, check_sft_checkpoint);
  if (!resumption.supervised()) {
    throw Error(fmt::format("--resume {}: is a run of leeway train; take leeway train --resume {}",
                            options.resume, options.resume));
  }
  return resume_supervised(config.now, program.catalog, std::move(resumption));
}

SupervisedSummary start(Program& program, const Options& options) {
  if (options.file.empty()) throw Error("sft: name a TOML file with an [sft] table");
  const Config config = load_config(program.catalog, options);
  if (!config.run.sft.enabled) throw Error(options.file + ": has no [sft] table");
  return run_supervised(config, program.catalog);
}

void run(Program& program, Options options) {
  reclaim_file(options);
  program.exit_code = tell(
      options.resume.empty() ? start(program, options) : resume(program, options), options.json);
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
                   "A run folder of leeway sft: goes on from its newest checkpoint")
      ->type_name("RUN");
  command->add_flag("--json", options->json, "Print the summary as JSON");
  command->callback([&program, options] { run(program, *options); });
}

}  // namespace leeway
