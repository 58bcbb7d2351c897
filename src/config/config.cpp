#include "config/config.h"

#include <fmt/format.h>

#include "config/given.h"
#include "config/run_reader.h"
#include "leeway/error.h"

namespace leeway {
namespace {

std::vector<std::string> native_keys(const Catalog& catalog) {
  std::vector<std::string> names = {"preset"};
  auto add = [&](std::span<const KeyInfo> keys) {
    for (const KeyInfo& key : keys) names.push_back(key.name);
  };
  add(Catalog::common_keys());
  for (const PresetInfo& preset : catalog.presets()) add(preset.keys);
  for (const CorrectionInfo& correction : catalog.corrections()) add(correction.keys);
  return names;
}

// What the document says of the loss, in order. With loss_only it says nothing else.
std::vector<const Given*> loss_part(const Document& document, ConfigScope scope) {
  std::vector<const Given*> part;
  for (const Given& given : document.values) {
    if (given.path == "trainer.loss." || scope == ConfigScope::loss_only) part.push_back(&given);
  }
  return part;
}

void read_loss(const Catalog& catalog, const std::vector<const Given*>& part, Config& config) {
  std::string preset_where;
  for (const Given* entry : part) {
    const Given& given = *entry;
    config.loss.push_back({given.key, to_value(given.value), given.where()});
    if (given.key != "preset") continue;
    const auto* preset = std::get_if<std::string>(&given.value);
    if (preset == nullptr) refuse(given, "must be text");
    config.preset = *preset;
    preset_where = given.where();
  }
  try {
    config.loss_spec = catalog.make_spec(config.preset, config.loss);
  } catch (const Error& error) {
    const std::string message = error.what();
    // A bad name is reported without a place: give it the one the name stands at.
    if (message.starts_with("preset \"") && !preset_where.empty()) {
      throw Error(preset_where + message);
    }
    throw;
  }
}

std::vector<EffectiveValue> loss_values(const std::vector<const Given*>& part,
                                        const Config& config) {
  std::vector<EffectiveValue> values;
  // The last value of a key as it was given, and its origin.
  auto given_of = [&](const std::string& key) -> std::pair<std::string, std::string> {
    const Given* found = nullptr;
    for (const Given* given : part) {
      if (given->key == key) found = given;
    }
    if (found == nullptr) return {"", "default"};
    return {scalar_text(found->value), found->place};
  };
  values.push_back({"trainer.loss.preset", toml_string(config.preset), given_of("preset").second});
  for (const auto& [key, value] : config.loss_spec.settings) {
    auto [text, origin] = given_of(key);
    if (text.empty()) {
      const bool number = value.find_first_not_of("0123456789.eE+-") == std::string::npos ||
                          value == "true" || value == "false";
      text = value == "infinity" ? "inf" : number ? value : fmt::format("\"{}\"", value);
    }
    values.push_back({"trainer.loss." + key, text, origin});
  }
  for (const std::string& key : config.loss_spec.inert) {
    const auto [text, origin] = given_of(key);
    values.push_back({"trainer.loss." + key, text, origin + ", inert"});
  }
  return values;
}

}  // namespace

void refuse_second_preset(const Settings& settings) {
  for (const Setting& setting : settings) {
    if (setting.key != "preset") continue;
    throw Error(fmt::format("{}preset = {}: the preset is named already", setting.where,
                            value_text(setting.value)));
  }
}

Config parse_config(const Catalog& catalog, const std::string& name, std::string_view text,
                    const std::vector<std::string>& sets, ConfigScope scope) {
  Config config;
  EnvironmentTable environment;
  const Known known{describe(config.run, config.renderer), describe(environment, 0),
                    native_keys(catalog)};
  Document document = read_document(known, name, text, scope);
  if (scope == ConfigScope::loss_only && !document.has_table("trainer.loss")) {
    throw Error(fmt::format("{}: has no [trainer.loss] table", name));
  }
  for (const std::string& assignment : sets) add_assignment(known, assignment, scope, document);
  if (scope == ConfigScope::whole) read_run(document, config.run, config.renderer);
  const std::vector<const Given*> loss = loss_part(document, scope);
  read_loss(catalog, loss, config);
  config.effective = loss_values(loss, config);
  if (scope == ConfigScope::whole) {
    check_run(document, config.run, config.loss_spec);
    config.effective = effective_values(document, config.run, config.renderer, config.effective);
  }
  return config;
}

std::string config_toml(const Config& config) {
  std::string out, table;
  for (const EffectiveValue& value : config.effective) {
    const size_t dot = value.key.rfind('.');
    const std::string path = dot == std::string::npos ? "" : value.key.substr(0, dot);
    if (path != table) {
      table = path;
      const bool list = path.starts_with("environment.");
      out += fmt::format("{}{}\n", out.empty() ? "" : "\n",
                         list ? "[[environment]]" : "[" + path + "]");
    }
    const std::string key = dot == std::string::npos ? value.key : value.key.substr(dot + 1);
    // A file's name may hold anything, a comment no control characters.
    std::string origin = value.origin;
    for (char& c : origin) {
      if (static_cast<unsigned char>(c) < 0x20 || c == '\x7f') c = '?';
    }
    out += fmt::format("{:<39} # {}\n", fmt::format("{} = {}", key, value.value), origin);
  }
  return out;
}

}  // namespace leeway
