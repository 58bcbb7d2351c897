// The leeway program: parses the command line, runs one command, turns errors into exit codes.
//
//   0 success   1 a check failed   2 the user's mistake   3 the run gave up   134 our own bug

#include <fmt/format.h>

#include <exception>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/output.h"
#include "leeway/error.h"

namespace {

// CLI11 asks for a subcommand where a wrong one was given; says which word it is and the nearest.
std::string misspelt_command(const CLI::App& app, int argc, char** argv) {
  const CLI::App* level = &app;
  for (int k = 1; k < argc && argv[k][0] != '-'; ++k) {
    std::vector<std::string> names;
    const CLI::App* next = nullptr;
    for (const CLI::App* sub : level->get_subcommands({})) {
      names.push_back(sub->get_name());
      if (sub->get_name() == argv[k]) next = sub;
    }
    if (names.empty()) return "";
    if (next == nullptr) {
      const std::string near = leeway::nearest_name(argv[k], names);
      return fmt::format("there is no command {}; {}", argv[k],
                         near.empty() ? fmt::format("known here: {}", fmt::join(names, ", "))
                                      : "did you mean " + near + "?");
    }
    level = next;
  }
  return "";
}

}  // namespace

int main(int argc, char** argv) {
  leeway::Program program;
  CLI::App app(
      "Leeway: reinforcement-learning post-training when the data is off-policy.\n"
      "Start with `leeway train`: a small model learns to sort letters in seconds.");
  app.name("leeway");
  app.require_subcommand(1);
  app.set_version_flag("--version", LEEWAY_VERSION);
  leeway::add_train(app, program);
  leeway::add_sft(app, program);
  leeway::add_eval(app, program);
  leeway::add_sweep(app, program);
  leeway::add_report(app, program);
  CLI::App* loss = app.add_subcommand(
      "loss", "Policy losses and off-policy corrections: list, explain, evaluate, check, compare");
  loss->require_subcommand(1);
  leeway::add_loss_list(*loss, program);
  leeway::add_loss_explain(*loss, program);
  leeway::add_loss_eval(*loss, program);
  leeway::add_loss_check(*loss, program);
  leeway::add_loss_compare(*loss, program);
  leeway::add_init(app, program);
  leeway::add_logprobs(app, program);
  leeway::add_generate(app, program);
  leeway::add_tokenize(app, program);
  leeway::add_render(app, program);
  leeway::add_trajectory(app, program);
  leeway::add_config(app, program);
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& success) {
    return app.exit(success);
  } catch (const CLI::ParseError& error) {
    const std::string word = misspelt_command(app, argc, argv);
    leeway::say(fmt::format("leeway: {}\nRun with --help for the options.",
                            word.empty() ? error.what() : word));
    return 2;
  } catch (const leeway::Error& error) {
    leeway::say(fmt::format("leeway: {}", error.what()));
    return 2;
  } catch (const std::bad_alloc&) {
    leeway::say("leeway: out of memory: the input is too large for this machine");
    return 2;
  }
  return program.exit_code;
}
