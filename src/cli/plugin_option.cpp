#include "cli/commands.h"
#include "leeway/plugin.h"

namespace leeway {

void add_plugin_option(CLI::App& command, Program& program) {
  command
      .add_option_function<std::string>(
          "--plugin", [&program](const std::string& file) { load_plugin(file, program.catalog); },
          "A library with presets and corrections of one's own (docs/extending.md)")
      ->type_name("LIBRARY");
}

}  // namespace leeway
