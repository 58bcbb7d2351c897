#include <fmt/format.h>

#include "base/json.h"
#include "cli/commands.h"
#include "cli/output.h"
#include "leeway/metrics.h"

namespace leeway {
namespace {

// Parentheses, not quotes, around keys with their defaults, so that they read as one line.
std::string keys_text(std::span<const KeyInfo> keys) {
  std::vector<std::string> parts;
  for (const KeyInfo& key : keys)
    parts.push_back(fmt::format("{} {}", key.name, key.default_value));
  return fmt::format("{}", fmt::join(parts, ", "));
}

std::string list_text(const Catalog& catalog) {
  std::string out = "Native presets (strict: unknown, contradictory and inert keys are refused)\n";
  for (const PresetInfo& p : catalog.presets()) {
    out += fmt::format("  {:<14} {}  [{}]\n", p.name, p.summary, p.origin);
  }
  out += "\nCorrections, on any base: BASE+CORRECTION[+CORRECTION]\n";
  for (const CorrectionInfo& c : catalog.corrections()) {
    out += fmt::format("  +{:<13} {}  [{}]\n", c.name, c.summary, c.origin);
  }
  if (!catalog.metrics().empty()) out += "\nMetrics of plugins, of every loss\n";
  for (const OwnMetric& metric : catalog.metrics()) {
    out += fmt::format("  plugin/{:<7} {}\n", metric.name, metric.definition);
  }
  out += "\nForeign presets (another code base's loss under its own keys)\n";
  for (const ForeignPreset& f : catalog.foreign()) {
    out += fmt::format("  {:<42} [{}]\n", f.name, f.source);
  }
  return out;
}

std::string list_json(const Catalog& catalog) {
  JsonWriter json;
  auto keys = [&](const std::vector<KeyInfo>& infos) {
    json.key("keys").begin_object();
    for (const KeyInfo& key : infos) json.key(key.name).value(key.default_value);
    json.end_object();
  };
  json.begin_object().key("presets").begin_array();
  for (const PresetInfo& p : catalog.presets()) {
    json.begin_object().key("name").value(p.name).key("summary").value(p.summary);
    json.key("origin").value(p.origin);
    keys(p.keys);
    json.end_object();
  }
  json.end_array().key("corrections").begin_array();
  for (const CorrectionInfo& c : catalog.corrections()) {
    json.begin_object().key("name").value(c.name).key("summary").value(c.summary);
    json.key("origin").value(c.origin);
    keys(c.keys);
    json.end_object();
  }
  json.end_array().key("metrics").begin_array();
  for (const OwnMetric& metric : catalog.metrics()) {
    json.begin_object().key("name").value("plugin/" + metric.name);
    json.key("definition").value(metric.definition).end_object();
  }
  json.end_array().key("foreign").begin_array();
  for (const ForeignPreset& f : catalog.foreign()) {
    json.begin_object().key("name").value(f.name).key("origin").value(f.source).end_object();
  }
  json.end_array().end_object();
  return json.text() + "\n";
}

// The whole of docs/losses.md: the tables below are its only source.
std::string list_markdown(const Catalog& catalog) {
  std::string out =
      "# Losses, corrections and metrics\n\n"
      "This page is printed by `leeway loss list --markdown`; a test compares it.\n\n"
      "A preset is a base, or a base with up to two corrections: `grpo+tis`. Keys stand in\n"
      "`[trainer.loss]` beside `preset`. `leeway loss explain PRESET` prints the objective with "
      "its\n"
      "numbers. Bounds are inclusive: `*_ratio_*` are absolute, `eps_*` distances from one,\n"
      "`*_diff_*` probability differences.\n\n"
      "## Native presets\n\n| preset | what it is | keys and defaults | origin "
      "|\n|---|---|---|---|\n";
  for (const PresetInfo& p : catalog.presets()) {
    out += fmt::format("| `{}` | {} | {} | {} |\n", p.name, p.summary, keys_text(p.keys), p.origin);
  }
  out +=
      "\n## Corrections\n\n| correction | what it does | keys and defaults | origin "
      "|\n|---|---|---|---|\n";
  for (const CorrectionInfo& c : catalog.corrections()) {
    out +=
        fmt::format("| `+{}` | {} | {} | {} |\n", c.name, c.summary, keys_text(c.keys), c.origin);
  }
  out += "\n## Keys\n\n| key | default | meaning | values |\n|---|---|---|---|\n";
  auto rows = [&](std::span<const KeyInfo> keys, const std::string& owner) {
    for (const KeyInfo& key : keys) {
      const std::string values = key.type == KeyType::choice
                                     ? fmt::format("{}", fmt::join(key.choices, ", "))
                                 : key.type == KeyType::number_or_off ? "a number, or \"off\""
                                                                      : "a number";
      out += fmt::format("| `{}` ({}) | {} | {} | {} |\n", key.name, owner, key.default_value,
                         key.meaning, values);
    }
  };
  rows(Catalog::common_keys(), "everywhere");
  for (const PresetInfo& p : catalog.presets()) rows(p.keys, p.name);
  for (const CorrectionInfo& c : catalog.corrections()) rows(c.keys, "+" + c.name);
  out +=
      "\n## Metrics\n\nRaw: before any clamp or mask. With x = log pi - log rollout, r = e^x and\n"
      "k3(x) = e^x - 1 - x. Batches merge exactly, by sums, extremes and a histogram.\n\n"
      "| metric | definition |\n|---|---|\n";
  for (const MetricInfo& m : metric_table())
    out += fmt::format("| `{}` | {} |\n", m.name, m.definition);
  out +=
      "\n## Foreign presets\n\nAnother code base's loss under its own names, keys and habits; keys "
      "without effect are\nlisted as `inert`.\n\n| preset | origin |\n|---|---|\n";
  for (const ForeignPreset& f : catalog.foreign()) {
    out += fmt::format("| `{}` | {} |\n", f.name, f.source);
  }
  return out;
}

}  // namespace

void add_loss_list(CLI::App& loss, Program& program) {
  auto* command = loss.add_subcommand("list", "Every preset, one line each, with its origin");
  auto json = std::make_shared<bool>(false), markdown = std::make_shared<bool>(false);
  command->add_flag("--json", *json, "Print JSON, with keys and defaults");
  add_plugin_option(*command, program);
  command->add_flag("--markdown", *markdown, "Print the reference page docs/losses.md");
  command->callback([&program, json, markdown] {
    print(*markdown ? list_markdown(program.catalog)
          : *json   ? list_json(program.catalog)
                    : list_text(program.catalog));
  });
}

}  // namespace leeway
