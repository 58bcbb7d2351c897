// The leeway program: parses the command line, runs one command, turns errors into exit codes.
//
//   0 success   1 a check failed   2 the user's mistake   3 the run gave up   134 our own bug

#include <fmt/format.h>

#include <cstdlib>
#include <exception>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/output.h"
#include "cli/streams.h"
#include "cli/version.h"
#include "leeway/error.h"
#include "run/failure.h"

namespace {

// Where the words of a command line lead, up to the first option.
struct Place {
  const CLI::App* command;
  std::string path;     // "leeway loss"
  std::string problem;  // a word that is not a command, and the nearest one that is
};
Place place_of(const CLI::App& app, const std::vector<std::string>& words) {
  Place place{&app, app.get_name(), ""};
  for (const std::string& word : words) {
    std::vector<std::string> names;
    const CLI::App* next = nullptr;
    for (const CLI::App* sub : place.command->get_subcommands({})) {
      names.push_back(sub->get_name());
      if (sub->get_name() == word) next = sub;
    }
    if (names.empty() || word.starts_with('-')) break;
    if (next == nullptr) {
      const std::string near = leeway::nearest_name(word, names);
      place.problem =
          fmt::format("there is no command {}; {}", word,
                      near.empty() ? fmt::format("known here: {}", fmt::join(names, ", "))
                                   : "did you mean " + near + "?");
      break;
    }
    place.command = next;
    place.path += " " + word;
  }
  return place;
}

// `leeway help loss eval` is `leeway loss eval --help`.
void add_help(CLI::App& app) {
  auto* command = app.add_subcommand("help", "Shows what a command does and its options");
  auto words = std::make_shared<std::vector<std::string>>();
  command->add_option("command", *words, "Such as train or loss eval; without one: all commands")
      ->type_name("COMMAND");
  command->callback([&app, words] {
    const Place place = place_of(app, *words);
    if (!place.problem.empty()) throw leeway::Error(place.problem);
    leeway::print(place.command->get_formatter()->make_help(place.command, place.path,
                                                            CLI::AppFormatMode::Normal));
  });
}

// For words that are settings or the configuration as other programs take them, of a command that
// has both; else empty.
std::string habit_hint(const CLI::App& command, const std::vector<std::string>& words) {
  if (command.get_option_no_throw("--set") == nullptr) return "";
  const auto is_key = [](std::string_view text) {
    return text.find('.') != text.npos &&
           text.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789_.") == text.npos;
  };
  for (size_t i = 0; i < words.size(); ++i) {
    std::string_view word = words[i];
    if (word == "--config" || word.starts_with("--config="))
      return "; the configuration is named without an option";
    const bool option = word.starts_with("--");
    if (option) word.remove_prefix(2);
    const size_t equals = word.find('=');
    if (!is_key(word.substr(0, equals)) || (!option && equals == word.npos)) continue;
    if (i > 0 && words[i - 1].ends_with("set")) continue;  // --set, --unset
    const std::string value = equals != word.npos ? std::string(word.substr(equals + 1))
                              : i + 1 < words.size() && !words[i + 1].starts_with('-')
                                  ? words[i + 1]
                                  : "VALUE";
    return fmt::format("; a setting is given as --set {}={}", word.substr(0, equals), value);
  }
  return "";
}

// Runs the command. The output of --help and --version is a result like any other.
void parse(CLI::App& app, int argc, char** argv) {
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& success) {
    std::ostringstream text;
    app.exit(success, text, text);
    leeway::print(text.str());
  }
}

}  // namespace

int main(int argc, char** argv) {
  leeway::secure_standard_streams();
  leeway::Program program;
  CLI::App app(
      "Leeway: reinforcement-learning post-training when the data is off-policy.\n"
      "Start with `leeway train`: a small model learns to sort letters in seconds.");
  app.name("leeway");
  app.require_subcommand(1);
  app.set_version_flag("--version", leeway::version_text(), "Print the version and exit");
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
  leeway::add_import(app, program);
  leeway::add_init(app, program);
  leeway::add_convert(app, program);
  leeway::add_logprobs(app, program);
  leeway::add_generate(app, program);
  leeway::add_serve(app, program);
  leeway::add_merge(app, program);
  leeway::add_tokenize(app, program);
  leeway::add_render(app, program);
  leeway::add_trajectory(app, program);
  leeway::add_config(app, program);
  leeway::add_completion(app, program);
  leeway::add_man(app, program);
  add_help(app);
  try {
    parse(app, argc, argv);
  } catch (const CLI::ParseError& error) {
    const Place place = place_of(app, {argv + 1, argv + argc});
    const bool is_extra = dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr;
    leeway::say(fmt::format("leeway: {}{}\nRun with --help for the options.",
                            place.problem.empty() ? error.what() : place.problem,
                            is_extra ? habit_hint(*place.command, {argv + 1, argv + argc}) : ""));
    return 2;
  } catch (...) {
    const leeway::Failure failure = leeway::failure_of(std::current_exception());
    leeway::say("leeway: " + failure.message);
    if (failure.exit_code == leeway::kOurBug) std::abort();
    return failure.exit_code;
  }
  return program.exit_code;
}
