#include <fmt/format.h>

#include "base/json.h"
#include "cli/commands.h"
#include "cli/config_options.h"
#include "cli/output.h"
#include "cli/quick_start.h"
#include "config/foreign_keys.h"
#include "leeway/error.h"
#include "run/configured_renderer.h"

namespace leeway {

void add_config(CLI::App& app, Program& program) {
  auto* command = app.add_subcommand(
      "config", "The effective configuration: every default, and where each value came from");
  struct Options : ConfigSource {
    bool json = false, example = false, reference = false, migration = false;
  };
  auto options = std::make_shared<Options>();
  add_config_options(*command, *options);
  command->add_flag("--json", options->json, "Print JSON");
  command->add_flag("--example", options->example,
                    "Print the configuration of the quick start instead");
  command->add_flag("--reference", options->reference,
                    "Print the reference page docs/configuration.md instead");
  command->add_flag("--migration", options->migration,
                    "Print the keys of other code bases beside ours (docs/migration.md) instead");
  command->callback([&program, options] {
    const bool overridden = !options->sets.empty() || !options->unsets.empty();
    if (options->reference || options->migration) {
      if (!options->file.empty() || overridden || options->json || options->example ||
          (options->reference && options->migration)) {
        throw Error(fmt::format("config: --{} takes no other options",
                                options->reference ? "reference" : "migration"));
      }
      return print(options->reference ? configuration_markdown(program.catalog)
                                      : migration_markdown());
    }
    if (!options->example) reclaim_file(*options);
    if (options->file.empty() && !options->example) {
      throw Error("config: give a TOML file, --example, --reference or --migration");
    }
    if (!options->file.empty() && options->example) {
      throw Error("config: --example takes no file");
    }
    // Printed verbatim, with its comments, unless it is modified or JSON is requested.
    if (options->example && !overridden && !options->json) {
      return print(quick_start_config());
    }
    const Config config = load_config(program.catalog, *options);
    if (!config.renderer.name.empty()) {
      make_configured_renderer(with_found_name(config.renderer, config.run.model.path), nullptr);
    }
    if (!options->json) return print(config_toml(config));
    JsonWriter json;
    json.begin_object();
    for (const EffectiveValue& value : config.effective) {
      json.key(value.key).begin_object().key("value").value(value.value);
      json.key("origin").value(value.origin).end_object();
    }
    json.end_object();
    print(json.text() + "\n");
  });
}

}  // namespace leeway
