// The program's commands and options as plain values, for what is made from them: shell completion
// and the man page.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "leeway/presets.h"

namespace leeway {

// What a word after an option, or a positional argument, can be completed with.
struct ArgumentValues {
  enum class Kind { none, files, words, keys };  // keys: of a configuration, each followed by "="
  Kind kind = Kind::none;
  std::vector<std::string> words;  // words, keys
};

struct OptionEntry {
  std::vector<std::string> names;  // "-h", "--help"; of a positional argument: "config"
  bool positional = false, takes_value = false, required = false, many = false;
  std::string type;           // "FILE", "INT"; of a choice: "{cpu,cuda}"
  std::string default_value;  // empty: none
  std::string meaning;
  ArgumentValues values;
};

struct CommandEntry {
  std::string path;     // "leeway loss eval"
  std::string name;     // "eval"
  std::string meaning;  // its lines as --help prints them
  std::vector<OptionEntry> options, positionals;
  std::vector<CommandEntry> commands;

  // The first line of the meaning, for lists.
  std::string summary() const;
};

// Of `app` and everything below it, in the order of --help.
CommandEntry command_tree(const CLI::App& app, const Catalog& catalog);

// `root` and all below it, each before what is below it.
std::vector<const CommandEntry*> all_commands(const CommandEntry& root);

}  // namespace leeway
