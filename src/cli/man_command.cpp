// `leeway man`: the manual page leeway(1), made from the commands themselves.

#include <fmt/format.h>

#include "cli/command_tree.h"
#include "cli/commands.h"
#include "cli/output.h"
#include "cli/version.h"

namespace leeway {
namespace {

// Text for troff, which reads backslashes everywhere and dots and quotes where a line begins.
// Hyphens stay what they are when they are copied into a shell.
std::string escaped(const std::string& text) {
  std::string out;
  bool first = true;
  for (const char c : text) {
    if (first && (c == '.' || c == '\'')) out += "\\&";
    if (c == '\\') {
      out += "\\e";
    } else if (c == '-') {
      out += "\\-";
    } else {
      out += c;
    }
    first = c == '\n';
  }
  return out;
}

std::string bold(const std::string& text) { return "\\fB" + escaped(text) + "\\fR"; }
std::string italic(const std::string& text) { return "\\fI" + escaped(text) + "\\fR"; }

std::string synopsis(const CommandEntry& command) {
  std::string out = bold(command.path);
  for (const OptionEntry& option : command.options) {
    if (option.required)
      out += fmt::format(" {} {}", bold(option.names.back()), italic(option.type));
  }
  out += " [" + italic("options") + "]";
  if (!command.commands.empty()) out += " " + italic("command") + " ..";
  for (const OptionEntry& argument : command.positionals) {
    const std::string name = italic(argument.names.back()) + (argument.many ? " .." : "");
    out += argument.required ? " " + name : " [" + name + "]";
  }
  return out;
}

std::string option_text(const OptionEntry& option) {
  std::string names;
  for (const std::string& name : option.names) {
    if (!names.empty()) names += ", ";
    names += option.positional ? italic(name) : bold(name);
  }
  if (option.takes_value && !option.positional) names += " " + italic(option.type);
  if (option.many) names += " ..";
  std::string out = fmt::format(".TP\n{}\n{}\n", names, escaped(option.meaning));
  if (!option.default_value.empty()) {
    out += fmt::format("Default: {}.\n", bold(option.default_value));
  }
  if (option.required) out += "Must be given.\n";
  return out;
}

// A command with its line of use, arguments and options.
std::string command_text(const CommandEntry& command) {
  std::string out = fmt::format(".SS {}\n{}\n.PP\n{}\n", bold(command.path), synopsis(command),
                                escaped(command.meaning));
  for (const OptionEntry& argument : command.positionals) out += option_text(argument);
  for (const OptionEntry& option : command.options) {
    if (option.names.back() != "--help") out += option_text(option);  // told once, for all
  }
  return out;
}

std::string man_page(const CommandEntry& root) {
  std::string out = fmt::format(
      ".\\\" Printed by `leeway man`.\n"
      ".TH LEEWAY 1 \"\" \"leeway {}\" \"Leeway\"\n"
      ".SH NAME\n"
      "leeway \\- reinforcement\\-learning post\\-training when the data is off\\-policy\n"
      ".SH SYNOPSIS\n{}\n"
      ".SH DESCRIPTION\n{}\n.PP\n"
      "Results go to standard output, progress and errors to standard error.\n"
      ".SH OPTIONS\n",
      escaped(version_number()), synopsis(root), escaped(root.meaning));
  for (const OptionEntry& option : root.options) out += option_text(option);
  out += ".PP\nEvery command takes \\fB\\-\\-help\\fR.\n.SH COMMANDS\n";
  for (const CommandEntry* command : all_commands(root)) {
    if (command != &root) out += command_text(*command);
  }
  return out +
         ".SH EXIT STATUS\n"
         ".TP\n\\fB0\\fR\nSuccess.\n"
         ".TP\n\\fB1\\fR\nA check failed.\n"
         ".TP\n\\fB2\\fR\nA mistake in the command line, the configuration or a file.\n"
         ".TP\n\\fB3\\fR\nThe run gave up: it made no progress.\n"
         ".TP\n\\fB134\\fR\nA bug of the program itself.\n"
         ".SH EXAMPLES\n"
         ".TP\n\\fBleeway train\\fR\nThe quick start: a small model learns to sort letters.\n"
         ".TP\n\\fBleeway config \\-\\-reference\\fR\nEvery key of a configuration.\n"
         ".TP\n\\fBleeway loss list\\fR\nEvery loss and correction with its keys.\n";
}

}  // namespace

void add_man(CLI::App& app, Program& program) {
  auto* command = app.add_subcommand("man", "The manual page leeway(1), for `man -l -`");
  command->callback([&app, &program] { print(man_page(command_tree(app, program.catalog))); });
}

}  // namespace leeway
