#include <fmt/format.h>

#include "base/files.h"
#include "base/json.h"
#include "cli/commands.h"
#include "cli/output.h"
#include "cli/sft_phase.h"
#include "leeway/error.h"

namespace leeway {
namespace {

struct Options : ConfigOptions {
  bool json = false;
};

void run(Program& program, Options options) {
  reclaim_positional(options.sets, options.file);
  if (options.file.empty()) throw Error("sft: name a TOML file with an [sft] table");
  const Config config = parse_config(program.catalog, options.file, read_file(options.file),
                                     options.sets, ConfigScope::whole);
  const SftTable& table = config.run.sft;
  if (!table.enabled) throw Error(options.file + ": has no [sft] table");
  const RunSetup setup(config, table.data.empty() || table.stop_at_reward > 0.0);
  RunFiles files(config, "cross entropy on the tokens of the demonstrations, mean over tokens\n");
  RunProgress progress(&files);
  const Interrupt interrupt;
  progress.note(fmt::format("run folder {}", files.folder()));
  const SftResult result = run_sft(setup, program.catalog, files, progress, interrupt);
  const std::string weights =
      files.save_weights(result.weights, result.steps, config.run.model.path);
  files.write_report();
  if (!result.failure.empty()) {
    say("leeway: the run gave up: " + result.failure);
    program.exit_code = 3;
  }
  if (options.json) {
    JsonWriter json;
    json.begin_object().key("end").value(!result.failure.empty() ? "gave_up"
                                         : result.stopped        ? "stopped"
                                                                 : "finished");
    json.key("run").value(files.folder()).key("weights").value(weights);
    json.key("steps").value(static_cast<double>(result.steps)).key("loss").value(result.loss);
    json.key("trained_tokens").value(static_cast<double>(result.tokens));
    return print(json.key("seconds").value(result.seconds).end_object().text() + "\n");
  }
  print(
      fmt::format("{} steps, loss {:.4f}, {:.0f} tokens/s\nweights  {}\nreport   {}/report.html\n",
                  result.steps, result.loss, static_cast<double>(result.tokens) / result.seconds,
                  weights, files.folder()));
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
  command->add_flag("--json", options->json, "Print the summary as JSON");
  command->callback([&program, options] { run(program, *options); });
}

}  // namespace leeway
