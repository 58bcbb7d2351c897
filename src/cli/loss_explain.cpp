#include <fmt/format.h>

#include "base/json.h"
#include "cli/commands.h"
#include "cli/output.h"
#include "config/config.h"
#include "core/explain.h"
#include "core/explain_text.h"
#include "leeway/error.h"
#include "leeway/metrics.h"

namespace leeway {
namespace {

std::string explain_json(const LossSpec& spec, const Explanation& e) {
  JsonWriter json;
  auto list = [&](const char* key, const std::vector<std::string>& lines) {
    json.key(key).begin_array();
    for (const std::string& line : lines) json.value(line);
    json.end_array();
  };
  json.begin_object().key("preset").value(spec.preset);
  list("objective", e.objective);
  list("dropped", e.dropped);
  list("gradient", e.gradient);
  list("denominator", e.denominator);
  list("notes", e.notes);
  list("reads", e.streams);
  json.key("settings").begin_object();
  for (const auto& [key, value] : spec.settings) json.key(key).value(value);
  json.end_object();
  list("inert", spec.inert);
  json.end_object();
  return json.text() + "\n";
}

}  // namespace

void add_loss_explain(CLI::App& loss, Program& program) {
  auto* command = loss.add_subcommand(
      "explain", "What a preset really computes: objective, drops, gradient, denominator");
  struct Options {
    std::string preset;
    std::vector<std::string> sets;
    bool json = false;
  };
  auto options = std::make_shared<Options>();
  command->add_option("preset", options->preset, "e.g. icepop, grpo+tis, verl/vanilla");
  command
      ->add_option("--set", options->sets, "key=value; may be repeated, the last of a key counts")
      ->type_name("KEY=VALUE");
  command->add_flag("--json", options->json, "Print JSON");
  add_plugin_option(*command, program);
  command->callback([&program, options] {
    reclaim_positional(options->sets, options->preset);
    if (options->preset.empty()) throw Error("loss explain: name a preset; see `leeway loss list`");
    Settings settings;
    for (const std::string& set : options->sets) settings.push_back(parse_assignment(set));
    refuse_second_preset(settings);
    const LossSpec spec = program.catalog.make_spec(options->preset, settings);
    print(options->json ? explain_json(spec, explain(spec)) : explain_text(spec));
  });
}

}  // namespace leeway
