// Shared by commands that take a configuration: its file, --set and --unset.
#pragma once

#include <CLI/CLI.hpp>

#include "config/config.h"
#include "run/config_source.h"

namespace leeway {

void add_config_options(CLI::App& command, ConfigSource& options);
// Only --set and --unset.
void add_override_options(CLI::App& command, ConfigSource& options);

// `--set a=1 b=2 FILE`: --set takes every word after it, and FILE may be among them. Throws Error
// for a word without an equals sign that is not a file either.
void reclaim_file(ConfigSource& options);

// Reads and checks the options' file, or the built-in quick start if none is given, and prints the
// configuration's notes. Throws Error.
Config load_config(const Catalog& catalog, const ConfigSource& options,
                   ConfigScope scope = ConfigScope::whole);

}  // namespace leeway
