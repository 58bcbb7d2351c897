#include <fmt/format.h>

#include "base/json.h"
#include "cli/commands.h"
#include "cli/output.h"
#include "cli/terminal_progress.h"
#include "model/adapter_io.h"
#include "model/merge.h"

namespace leeway {
namespace {

struct Options {
  std::string base, adapter, output;
  bool json = false;
};

void run(const Options& options) {
  check_model_folder("BASE " + options.base, options.base);
  check_model_folder("ADAPTER " + options.adapter, options.adapter);
  if (const std::string warning = other_base_warning(options.adapter, options.base);
      !warning.empty()) {
    warn(warning);
  }
  MergeResult result;
  {
    TerminalProgress progress;
    result = merge_adapter(
        options.base, options.adapter, options.output,
        [&](size_t done, size_t total) { progress.count("merge", "tensors", done, total); });
  }
  if (!options.json) {
    return say(fmt::format("{}: {} tensors, {} of them with the adapter", options.output,
                           result.tensors, result.merged));
  }
  JsonWriter json;
  json.begin_object().key("folder").value(options.output);
  json.key("tensors").value(static_cast<double>(result.tensors));
  json.key("merged").value(static_cast<double>(result.merged));
  json.key("bytes").value(static_cast<double>(result.bytes)).end_object();
  print(json.text() + "\n");
}

}  // namespace

void add_merge(CLI::App& app, Program&) {
  auto* command = app.add_subcommand(
      "merge",
      "Puts a LoRA adapter into its base: a Hugging Face folder that every program loads.\n"
      "  leeway merge models/base runs/lora/weights/step_200 models/merged\n"
      "Matrices are W + alpha / rank B A, summed in float32, in the base's dtype. The folder "
      "appears\n"
      "whole or not at all.");
  auto options = std::make_shared<Options>();
  command->add_option("base", options->base, "Hugging Face folder of the base")->required();
  command->add_option("adapter", options->adapter, "The adapter, as PEFT saves it")->required();
  command->add_option("output", options->output, "Folder to create")->required();
  command->add_flag("--json", options->json, "Print JSON");
  command->callback([options] { run(*options); });
}

}  // namespace leeway
