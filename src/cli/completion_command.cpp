// `leeway completion SHELL`: a script that completes commands, options and their values, made from
// the commands themselves.

#include <fmt/format.h>

#include <algorithm>

#include "cli/command_tree.h"
#include "cli/commands.h"
#include "cli/output.h"

namespace leeway {
namespace {

using Kind = ArgumentValues::Kind;

// 'text' for a shell; each of them writes a quote inside as '\''.
std::string shell_quoted(const std::string& text) {
  std::string out = "'";
  for (const char c : text) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return out + "'";
}

std::string without_program(const CommandEntry& command) {
  const size_t space = command.path.find(' ');
  return space == std::string::npos ? "" : command.path.substr(space + 1);
}

std::vector<std::string> names_below(const CommandEntry& command) {
  std::vector<std::string> names;
  for (const CommandEntry& below : command.commands) names.push_back(below.name);
  return names;
}

// The paths of all commands but the program's own, quoted, as one `case` pattern or list.
std::string all_paths(const CommandEntry& root, const char* between, bool with_program) {
  std::string out;
  for (const CommandEntry* command : all_commands(root)) {
    if (command == &root) continue;
    if (!out.empty()) out += between;
    out += shell_quoted(with_program ? command->path : without_program(*command));
  }
  return out;
}

// ---------------------------------------------------------------------------------------------

std::string bash_values(const ArgumentValues& values) {
  switch (values.kind) {
    case Kind::none: return "return";
    case Kind::files: return "_leeway_files; return";
    case Kind::words:
      return fmt::format("words={}", shell_quoted(fmt::format("{}", fmt::join(values.words, " "))));
    case Kind::keys: {
      std::string keys;
      for (const std::string& key : values.words) keys += (keys.empty() ? "" : " ") + key + "=";
      return fmt::format("words={}; compopt -o nospace 2>/dev/null", shell_quoted(keys));
    }
  }
  return "";
}

std::string bash_script(const CommandEntry& root) {
  std::string options, arguments, values;
  for (const CommandEntry* command : all_commands(root)) {
    std::vector<std::string> names;
    for (const OptionEntry& option : command->options) {
      names.insert(names.end(), option.names.begin(), option.names.end());
      if (!option.takes_value) continue;
      std::string pattern;
      for (const std::string& name : option.names) {
        pattern += (pattern.empty() ? "" : "|") + shell_quoted(command->path + " " + name);
      }
      values += fmt::format("    {}) {} ;;\n", pattern, bash_values(option.values));
    }
    options += fmt::format("      {}) words={} ;;\n", shell_quoted(command->path),
                           shell_quoted(fmt::format("{}", fmt::join(names, " "))));
    const std::vector<std::string> below = names_below(*command);
    if (!below.empty()) {
      arguments += fmt::format("      {}) words={} ;;\n", shell_quoted(command->path),
                               shell_quoted(fmt::format("{}", fmt::join(below, " "))));
    } else if (command->name == "help") {
      arguments += fmt::format("      {}) words={} ;;\n", shell_quoted(command->path),
                               shell_quoted(fmt::format("{}", fmt::join(names_below(root), " "))));
    } else if (!command->positionals.empty()) {
      arguments += fmt::format("      {}) {} ;;\n", shell_quoted(command->path),
                               bash_values(command->positionals.front().values));
    }
  }
  return fmt::format(
      R"(# Completion of leeway for bash, printed by `leeway completion bash`.
# Load it with: source <(leeway completion bash)

_leeway_files() {{
  compopt -o filenames 2>/dev/null
  mapfile -t COMPREPLY < <(compgen -f -- "$current")
}}

_leeway() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}}
  local command=leeway words='' i
  COMPREPLY=()
  # bash splits --option=value into three words.
  if [[ $current == '=' ]]; then
    current=''
  elif [[ $previous == '=' && COMP_CWORD -ge 2 ]]; then
    previous=${{COMP_WORDS[COMP_CWORD-2]}}
  fi
  for ((i = 1; i < COMP_CWORD; ++i)); do
    case "$command ${{COMP_WORDS[i]}}" in
      {}) command+=" ${{COMP_WORDS[i]}}" ;;
      *) break ;;
    esac
  done
  # A value of the option before the cursor.
  case "$command $previous" in
{}  esac
  if [[ -z $words && $current == -* ]]; then
    case "$command" in
{}    esac
  elif [[ -z $words ]]; then
    case "$command" in
{}    esac
  fi
  mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current")
}}

complete -F _leeway leeway
)",
      all_paths(root, "|", true), values, options, arguments);
}

// ---------------------------------------------------------------------------------------------

// For _arguments and _describe: a backslash before what separates there.
std::string zsh_escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '[' || c == ']' || c == ':' || c == '\\') out += '\\';
    out += c == '\n' ? ' ' : c;
  }
  return out;
}

std::string zsh_action(const ArgumentValues& values) {
  switch (values.kind) {
    case Kind::none: return " ";
    case Kind::files: return "_files";
    case Kind::words: return fmt::format("({})", fmt::join(values.words, " "));
    case Kind::keys: return fmt::format("_values -S= key {}", fmt::join(values.words, " "));
  }
  return " ";
}

std::string zsh_arguments(const CommandEntry& command) {
  std::string out;
  for (const OptionEntry& option : command.options) {
    for (const std::string& name : option.names) {
      std::string spec = option.many ? "*" : "";
      spec += fmt::format("{}[{}]", name, zsh_escaped(option.meaning));
      if (option.takes_value) spec += ":value:" + zsh_action(option.values);
      out += fmt::format(" \\\n        {}", shell_quoted(spec));
    }
  }
  for (size_t i = 0; i < command.positionals.size(); ++i) {
    const OptionEntry& argument = command.positionals[i];
    const std::string place = argument.many ? "*" : fmt::format("{}", i + 1);
    out += fmt::format(" \\\n        {}",
                       shell_quoted(fmt::format("{}:{}:{}", place, argument.names.back(),
                                                zsh_action(argument.values))));
  }
  return out;
}

std::string zsh_script(const CommandEntry& root) {
  std::string cases;
  for (const CommandEntry* command : all_commands(root)) {
    cases += fmt::format("    ({})\n", shell_quoted(command->path));
    if (!command->commands.empty()) {
      cases += "      commands=(";
      for (const CommandEntry& below : command->commands) {
        cases += fmt::format("\n        {}",
                             shell_quoted(below.name + ":" + zsh_escaped(below.summary())));
      }
      cases += ")\n      [[ $PREFIX == -* ]] || _describe -t commands command commands\n";
    }
    cases += fmt::format("      _arguments{}\n      ;;\n", zsh_arguments(*command));
  }
  return fmt::format(
      R"(#compdef leeway
# Completion of leeway for zsh, printed by `leeway completion zsh`.
# Put it as _leeway into a folder of $fpath.

_leeway() {{
  local command=leeway
  local -a commands
  integer at=2
  while (( at < CURRENT )); do
    case "$command ${{words[at]}}" in
      ({}) command+=" ${{words[at]}}" ;;
      (*) break ;;
    esac
    (( at++ ))
  done
  # _arguments sees the last command's name as the program.
  words=("${{(@)words[at-1,-1]}}")
  (( CURRENT -= at - 2 ))
  case "$command" in
{}  esac
}}

if [[ $funcstack[1] == _leeway ]]; then
  _leeway "$@"
else
  compdef _leeway leeway
fi
)",
      all_paths(root, "|", true), cases);
}

// ---------------------------------------------------------------------------------------------

std::string fish_values(const ArgumentValues& values) {
  switch (values.kind) {
    case Kind::none: return " -x";
    case Kind::files: return " -r -F";
    case Kind::words:
    case Kind::keys: {
      std::string words;
      for (const std::string& word : values.words) {
        words += (words.empty() ? "" : " ") + word + (values.kind == Kind::keys ? "=" : "");
      }
      return " -x -a " + shell_quoted(words);
    }
  }
  return "";
}

std::string fish_script(const CommandEntry& root) {
  std::string lines;
  for (const CommandEntry* command : all_commands(root)) {
    const std::string at = fmt::format("complete -c leeway -n {}",
                                       shell_quoted("__leeway_at " + without_program(*command)));
    for (const CommandEntry& below : command->commands) {
      lines += fmt::format("{} -f -a {} -d {}\n", at, below.name, shell_quoted(below.summary()));
    }
    for (const OptionEntry& option : command->options) {
      std::string names;
      for (const std::string& name : option.names) {
        names += name.starts_with("--") ? " -l " + name.substr(2) : " -s " + name.substr(1);
      }
      std::string meaning = option.meaning;
      std::replace(meaning.begin(), meaning.end(), '\n', ' ');
      lines +=
          fmt::format("{}{}{} -d {}\n", at, names,
                      option.takes_value ? fish_values(option.values) : "", shell_quoted(meaning));
    }
    if (command->name == "help") {
      lines += fmt::format("{} -f -a {}\n", at,
                           shell_quoted(fmt::format("{}", fmt::join(names_below(root), " "))));
    } else if (!command->positionals.empty()) {
      const ArgumentValues& values = command->positionals.front().values;
      lines += fmt::format("{}{}\n", at, values.kind == Kind::files ? " -F" : fish_values(values));
    }
  }
  return fmt::format(
      R"(# Completion of leeway for fish, printed by `leeway completion fish`.
# Load it with: leeway completion fish | source

# Whether the words before the cursor name this command, as in: __leeway_at loss eval
function __leeway_at
  set -l command
  for word in (commandline -opc)[2..-1]
    set -l longer $command $word
    contains -- "$longer" {}
    or break
    set command $longer
  end
  test "$command" = "$argv"
end

complete -c leeway -f
{})",
      all_paths(root, " ", false), lines);
}

}  // namespace

void add_completion(CLI::App& app, Program& program) {
  auto* command = app.add_subcommand("completion",
                                     "A script that completes commands and options in your shell");
  auto shell = std::make_shared<std::string>();
  command->add_option("shell", *shell, "The shell that reads it")
      ->check(CLI::IsMember({"bash", "zsh", "fish"}))
      ->required();
  command->callback([&app, &program, shell] {
    const CommandEntry root = command_tree(app, program.catalog);
    print(*shell == "bash"  ? bash_script(root)
          : *shell == "zsh" ? zsh_script(root)
                            : fish_script(root));
  });
}

}  // namespace leeway
