#include "base/files.h"
#include "base/json.h"
#include "cli/commands.h"
#include "cli/configured_renderer.h"
#include "cli/output.h"
#include "cli/quick_start.h"
#include "config/config.h"
#include "leeway/error.h"

namespace leeway {

void add_config(CLI::App& app, Program& program) {
  auto* command = app.add_subcommand(
      "config", "The effective configuration: every default, and where each value came from");
  struct Options {
    std::string file;
    std::vector<std::string> sets;
    bool json = false, example = false, reference = false;
  };
  auto options = std::make_shared<Options>();
  command->add_option("config", options->file, "A TOML file");
  command
      ->add_option("--set", options->sets,
                   "trainer.max_steps=50; may be repeated, the last of a key counts")
      ->type_name("KEY=VALUE");
  command->add_flag("--json", options->json, "Print JSON");
  command->add_flag("--example", options->example,
                    "Print the configuration of the quick start instead");
  command->add_flag("--reference", options->reference,
                    "Print the reference page docs/configuration.md instead");
  command->callback([&program, options] {
    if (options->reference) {
      if (!options->file.empty() || !options->sets.empty() || options->json || options->example) {
        throw Error("config: --reference stands alone");
      }
      return print(configuration_markdown(program.catalog));
    }
    if (!options->example) reclaim_positional(options->sets, options->file);
    if (options->file.empty() && !options->example) {
      throw Error("config: name a TOML file, or ask for --example or --reference");
    }
    if (!options->file.empty() && options->example) {
      throw Error("config: --example takes no file");
    }
    // As it is written, with its comments, unless something is asked of it.
    if (options->example && options->sets.empty() && !options->json) {
      return print(quick_start_config());
    }
    const Config config = parse_config(
        program.catalog, options->example ? kQuickStartName : options->file,
        options->example ? std::string(quick_start_config()) : read_file(options->file),
        options->sets, ConfigScope::whole);
    if (!config.renderer.name.empty()) make_configured_renderer(config.renderer, nullptr);
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
