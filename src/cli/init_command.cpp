#include <fmt/format.h>

#include <filesystem>

#include "base/files.h"
#include "cli/commands.h"
#include "cli/output.h"
#include "cli/seed_option.h"
#include "leeway/error.h"
#include "model/parameters.h"

namespace leeway {
namespace {

struct Options {
  std::string config, output;
  uint64_t seed = 0;
  int64_t shard_bytes = int64_t{5} << 30;
};

void refuse_what_exists(const std::string& output) {
  if (!is_present(output)) return;
  std::error_code failure;
  const bool empty =
      std::filesystem::is_directory(output, failure) && std::filesystem::is_empty(output, failure);
  if (failure) throw Error(fmt::format("--output {}: {}", output, failure.message()));
  if (empty) return;
  throw Error(
      fmt::format("--output {}: exists and is not an empty folder; nothing is overwritten, name "
                  "another",
                  output));
}

void run(const Options& options) {
  refuse_what_exists(options.output);
  const ModelConfig config = parse_model_config(options.config, read_file(options.config));
  Parameters parameters(config);
  initialise(parameters, options.seed);
  save_parameters(parameters, options.output, options.shard_bytes);
  say(fmt::format("{}: {} parameters, seed {}", options.output, parameters.count(), options.seed));
}

}  // namespace

void add_init(CLI::App& app, Program&) {
  auto* command = app.add_subcommand("init",
                                     "Writes a Hugging Face folder with random weights for a "
                                     "config.json: the same seed gives the\n"
                                     "same weights everywhere.");
  auto options = std::make_shared<Options>();
  command->add_option("--config", options->config, "A config.json (Qwen3, Qwen2, Llama)")
      ->required();
  command->add_option("--output", options->output, "Folder to create")->required();
  command->add_option("--seed", options->seed, "Seed of the weights")
      ->check(not_negative())
      ->capture_default_str();
  command->add_option("--shard-bytes", options->shard_bytes, "Maximum bytes of one weight file")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 50))
      ->capture_default_str();
  command->callback([options] { run(*options); });
}

}  // namespace leeway
