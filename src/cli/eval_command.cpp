#include <fmt/format.h>

#include <algorithm>
#include <memory>

#include "base/json.h"
#include "cli/commands.h"
#include "cli/config_options.h"
#include "cli/output.h"
#include "cli/terminal_progress.h"
#include "cli/text_options.h"
#include "leeway/error.h"
#include "model/adapter_io.h"
#include "run/durations.h"
#include "run/environment_check.h"
#include "run/policy_evaluation.h"

namespace leeway {
namespace {

struct Options : ConfigSource {
  std::string model, adapter;
  bool json = false;
};

// What --weights and --adapter name; where they name nothing, the policy of [model].
Parameters policy_of(const RunSetup& setup, const std::string& model, const std::string& adapter) {
  const std::shared_ptr<const Parameters>& base = setup.weights.base();
  if (!model.empty()) check_model_folder("--weights " + model, model);
  if (!adapter.empty()) check_adapter_option(adapter);
  if (!model.empty() && !adapter.empty()) return load_named_policy(model, adapter);
  const std::string& path = setup.config.run.model.path;
  if (!adapter.empty()) {
    const std::string warning = other_base_warning(adapter, path);
    if (!warning.empty()) warn(warning);
    return load_adapter(adapter, base ? base : std::make_shared<const Parameters>(setup.weights),
                        path);
  }
  if (model.empty()) return setup.weights;
  return base && is_adapter_folder(model) ? load_adapter(model, base, path)
                                          : load_parameters(model);
}

EvaluationResult evaluate(const RunSetup& setup, const std::string& model,
                          const std::string& adapter) {
  const auto weights = std::make_shared<const PolicySnapshot>(policy_of(setup, model, adapter), 0);
  if (weights->config().vocab_size != setup.weights.config().vocab_size) {
    throw Error(fmt::format("--weights {}: has a vocabulary of {}, the configuration's model {}",
                            model, weights->config().vocab_size,
                            setup.weights.config().vocab_size));
  }
  check_environments(*setup.environments);
  TerminalProgress progress;
  EvaluationEvents events;
  events.on_rollouts = [&](size_t done, size_t total) {
    progress.count("eval", "rollouts", done, total);
  };
  events.on_first_failure = [&](const std::string& line) { progress.note(line); };
  return PolicyEvaluator(setup).evaluate(weights, setup.config.run.eval, events);
}

void run(Program& program, Options options) {
  reclaim_file(options);
  if (options.file.empty()) throw Error("eval: give a TOML file with an [[environment]]");
  const RunSetup setup(load_config(program.catalog, options));
  if (setup.config.run.model.path.empty() && options.model.empty()) {
    say(fmt::format(
        "leeway: note: these are random weights: [model] of {} has no path; --weights names a "
        "trained policy, such as RUN/weights/step_200",
        options.file));
  }
  const EvaluationResult result = evaluate(setup, options.model, options.adapter);
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
  print(evaluation_table(result, setup.environment_ids));
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
  add_adapter_option(*command, options->adapter);
  command->add_flag("--json", options->json, "Print JSON");
  command->callback([&program, options] { run(program, *options); });
}

}  // namespace leeway
