// What commands that take a configuration share: its file, --set and --unset.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "config/config.h"

namespace leeway {

struct ConfigOptions {
  std::string file;
  std::vector<std::string> sets, unsets;
};

void add_config_options(CLI::App& command, ConfigOptions& options);
// --set and --unset alone.
void add_override_options(CLI::App& command, ConfigOptions& options);

// `--set a=1 b=2 FILE`: --set takes every word after it, and FILE may be among them. Throws Error
// for a word without an equals sign that is no file either.
void reclaim_file(ConfigOptions& options);

// Reads and checks the options' file, or the built-in quick start where none is named, and says
// what the configuration has to say. Throws Error.
Config load_config(const Catalog& catalog, const ConfigOptions& options,
                   ConfigScope scope = ConfigScope::whole);

// The notes of a configuration, on stderr.
void say_notes(const Config& config);

}  // namespace leeway
