#include <fmt/format.h>

#include <cmath>

#include "base/json.h"
#include "cli/commands.h"
#include "cli/config_options.h"
#include "leeway/error.h"
#include "run/durations.h"
#include "run/environment_check.h"
#include "run/output.h"
#include "run/policy_evaluation.h"

namespace leeway {
namespace {

struct Options : ConfigOptions {
  std::string model;
  bool json = false;
};

std::string table_of(const EvaluationResult& result, const std::vector<std::string>& ids) {
  std::vector<std::vector<std::string>> rows;
  const auto add = [&](const std::string& id) {
    const auto row = [&](const std::string& name, const std::string& mean) {
      const std::string path = "eval/" + id + "/" + name;
      const double value = result.metric(path + mean);
      if (std::isnan(value)) return;
      const double low = result.metric(path + "/low"), high = result.metric(path + "/high");
      rows.push_back({id, name, fmt::format("{:.4f}", value),
                      std::isnan(low) ? "" : fmt::format("{:.4f} .. {:.4f}", low, high)});
    };
    row("reward", "/mean");
    for (int64_t k = 1; k <= (int64_t{1} << 20); k *= 2) row(fmt::format("pass@{}", k), "");
    row("greedy", "/mean");
  };
  if (ids.size() > 1) add("all");
  for (const std::string& id : ids) add(id);
  return format_table({"environment", "metric", "mean", "95 % interval"}, rows) +
         "\npass@k  chance that at least one of k answers to a prompt is right: its first reward "
         "is 1 or more\n";
}

void run(Program& program, Options options) {
  reclaim_file(options);
  if (options.file.empty()) throw Error("eval: name a TOML file with an [[environment]]");
  const RunSetup setup(load_config(program.catalog, options));
  const Parameters weights = options.model.empty() ? setup.weights : load_parameters(options.model);
  if (weights.config().vocab_size != setup.weights.config().vocab_size) {
    throw Error(fmt::format("--weights {}: has a vocabulary of {}, the configuration's model {}",
                            options.model, weights.config().vocab_size,
                            setup.weights.config().vocab_size));
  }
  check_environments(*setup.environments);
  const EvaluationResult result =
      evaluate_policy(setup, PolicySnapshot::view_of(weights, 0), setup.config.run.eval, 0, false);
  if (result.failed > 0) say("leeway: " + failures_text(result));
  if (result.nothing_completed()) {
    program.exit_code = 3;
    return;
  }
  if (options.json) {
    JsonWriter json;
    json.begin_object();
    for (const auto& [name, value] : result.metrics) json.key(name).value(value);
    return print(json.end_object().text() + "\n");
  }
  print(table_of(result, setup.environment_ids));
  say(fmt::format("{} tokens in {}, {:.0f} tokens/s", result.tokens, duration_text(result.seconds),
                  static_cast<double>(result.tokens) / std::max(result.seconds, 1e-9)));
}

}  // namespace

void add_eval(CLI::App& app, Program& program) {
  auto* command = app.add_subcommand(
      "eval",
      "Evaluates a policy on the held-out prompts of a configuration's environments: mean reward\n"
      "and pass@k with 95 % intervals, and greedily.");
  auto options = std::make_shared<Options>();
  add_config_options(*command, *options);
  command->add_option("--weights", options->model,
                      "A Hugging Face folder, such as RUN/weights/step_200; default: [model]");
  command->add_flag("--json", options->json, "Print JSON");
  command->callback([&program, options] { run(program, *options); });
}

}  // namespace leeway
