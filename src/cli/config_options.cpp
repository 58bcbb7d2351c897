#include "cli/config_options.h"

#include <fmt/format.h>

#include <filesystem>

#include "base/files.h"
#include "cli/commands.h"
#include "cli/output.h"
#include "cli/quick_start.h"
#include "leeway/error.h"

namespace leeway {

void add_override_options(CLI::App& command, ConfigSource& options) {
  command
      .add_option(
          "--set", options.sets,
          "table.key=value, overrides the file; may be repeated, the last value of a key wins")
      ->type_name("KEY=VALUE");
  command
      .add_option("--unset", options.unsets,
                  "Removes a key or table of the file, such as sft; may be repeated")
      ->type_name("KEY")
      ->allow_extra_args(false);
}

void add_config_options(CLI::App& command, ConfigSource& options) {
  command.add_option("config", options.file, "A TOML file (docs/configuration.md)");
  add_override_options(command, options);
}

void reclaim_file(ConfigSource& options) {
  if (!options.file.empty()) return;
  reclaim_positional(options.sets, options.file);
  std::error_code ignored;  // opening it later reports the error
  if (options.file.empty() || std::filesystem::exists(options.file, ignored) || ignored) return;
  throw Error(fmt::format("--set {}: has no \"=\"; write it as key=value (and there is no file {})",
                          options.file, options.file));
}

Config load_config(const Catalog& catalog, const ConfigSource& options, ConfigScope scope) {
  const bool quick_start = options.file.empty();
  Config config =
      parse_config(catalog, quick_start ? kQuickStartName : options.file,
                   quick_start ? std::string(quick_start_config()) : read_file(options.file),
                   options.sets, scope, options.unsets);
  for (const std::string& note : config.notes) say("leeway: note: " + note);
  return config;
}

}  // namespace leeway
