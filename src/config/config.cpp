#include "config/config.h"

#include <fmt/format.h>
#include <toml++/toml.h>

#include <algorithm>
#include <cstdlib>

#include "base/json.h"
#include "leeway/error.h"

namespace leeway {
namespace {

// A TOML node as a settings value. Throws for what no key takes.
Value value_of(const toml::node& node, const std::string& where) {
  if (const auto* boolean = node.as_boolean()) return boolean->get();
  if (const auto* integer = node.as_integer()) return static_cast<double>(integer->get());
  if (const auto* number = node.as_floating_point()) return number->get();
  if (const auto* text = node.as_string()) return text->get();
  const char* kind = node.is_array() ? "a list" : node.is_table() ? "a table" : "a date or time";
  throw Error(fmt::format("{}: {} is not a value any key here takes", where, kind));
}

std::string toml_text(const Value& value) {
  if (const auto* text = std::get_if<std::string>(&value)) {
    JsonWriter quoted;  // TOML's basic strings escape as JSON's do
    quoted.value(*text);
    return quoted.text();
  }
  const std::string plain = value_text(value);
  return plain == "infinity" ? "inf" : plain == "-infinity" ? "-inf" : plain;
}

// A TOML node in few words, for messages.
std::string node_text(const toml::node& node) {
  if (node.is_table()) return "a table";
  if (node.is_array()) return "a list";
  if (!node.is_value() || node.is_date() || node.is_time() || node.is_date_time()) return "a date";
  return toml_text(value_of(node, ""));
}

[[noreturn]] void refuse_unknown(const std::string& where, const std::string& path,
                                 const std::string& key, const std::string& value,
                                 const std::vector<std::string>& known) {
  const std::string near = nearest_name(key, known);
  throw Error(fmt::format("{}: {}{} = {}: unknown {}; {}", where, path, key, value,
                          path.empty() ? "table or key" : "key",
                          near.empty() ? fmt::format("known here: {}", fmt::join(known, ", "))
                                       : fmt::format("did you mean {}{}?", path, near)));
}

// The tables a configuration has: outer name, inner name.
constexpr std::pair<const char*, const char*> kTables[] = {{"trainer", "loss"},
                                                           {"orchestrator", "renderer"}};

// Calls `each(path, table)` for the tables that are there, refusing everything beside them unless
// only the loss is asked for.
template <class Each>
void for_each_table(const toml::table& root, const std::string& name, ConfigScope scope,
                    Each each) {
  auto line = [&](const toml::key& key) {
    return fmt::format("{} line {}", name, key.source().begin.line);
  };
  for (const auto& [key, node] : root) {
    const std::string outer(key.str());
    std::vector<std::string> outers, inners;
    for (const auto& [known_outer, known_inner] : kTables) {
      outers.emplace_back(known_outer);
      if (outer == known_outer) inners.emplace_back(known_inner);
    }
    const bool looked_at = scope == ConfigScope::whole || outer == "trainer";
    if (!looked_at) continue;
    if (inners.empty()) refuse_unknown(line(key), "", outer, node_text(node), outers);
    if (!node.is_table()) {
      throw Error(fmt::format("{}: {} = {}: must be a table", line(key), outer, node_text(node)));
    }
    for (const auto& [inner_key, child] : *node.as_table()) {
      const std::string inner(inner_key.str());
      const std::string path = outer + "." + inner;
      if (std::find(inners.begin(), inners.end(), inner) == inners.end()) {
        if (scope == ConfigScope::loss_only) continue;
        refuse_unknown(line(inner_key), outer + ".", inner, node_text(child), inners);
      }
      if (!child.is_table()) {
        throw Error(
            fmt::format("{}: {} = {}: must be a table", line(inner_key), path, node_text(child)));
      }
      each(path, *child.as_table());
    }
  }
}

// The key-value pairs of a table, in the order of the file, with their places.
Settings settings_of(const toml::table& table, const std::string& name, const std::string& path) {
  Settings settings;
  for (const auto& [key, node] : table) {
    const std::string where = fmt::format("{} line {}", name, key.source().begin.line);
    const std::string full = fmt::format("{}: {}.{}", where, path, std::string(key.str()));
    settings.push_back({std::string(key.str()), value_of(node, full), where + ": " + path + "."});
  }
  // TOML tables are sorted by key; problems are reported in the order of the file.
  std::stable_sort(settings.begin(), settings.end(), [&](const Setting& a, const Setting& b) {
    return table.get(a.key)->source().begin.line < table.get(b.key)->source().begin.line;
  });
  return settings;
}

RendererConfig read_renderer(const Settings& settings) {
  RendererConfig renderer;
  const std::vector<std::string> known = {"name", "preserve_all_thinking",
                                          "preserve_thinking_between_tool_calls"};
  const Setting* flag = nullptr;
  for (const Setting& setting : settings) {
    auto refuse = [&](const std::string& problem) {
      throw Error(fmt::format("{}{} = {}: {}", setting.where, setting.key,
                              value_text(setting.value), problem));
    };
    if (std::find(known.begin(), known.end(), setting.key) == known.end()) {
      const std::string near = nearest_name(setting.key, known);
      refuse(near.empty() ? fmt::format("unknown key; known here: {}", fmt::join(known, ", "))
                          : fmt::format("unknown key; did you mean {}?", near));
    }
    if (setting.key == "name") {
      const auto* text = std::get_if<std::string>(&setting.value);
      if (text == nullptr) refuse("must be text, the name of a renderer");
      renderer.name = *text;
      renderer.where = setting.where;
      continue;
    }
    const auto* on = std::get_if<bool>(&setting.value);
    if (on == nullptr) refuse("must be true or false");
    (setting.key == "preserve_all_thinking" ? renderer.preserve_all_thinking
                                            : renderer.preserve_thinking_between_tool_calls) = *on;
    if (*on) flag = &setting;
  }
  if (flag != nullptr && renderer.name.empty()) {
    throw Error(fmt::format("{}{} = true: inert without a renderer; give its name", flag->where,
                            flag->key));
  }
  return renderer;
}

}  // namespace

Setting parse_assignment(const std::string& assignment) {
  const size_t equals = assignment.find('=');
  if (equals == 0 || equals == std::string::npos) {
    throw Error(fmt::format("--set {}: write it as key=value", assignment));
  }
  auto trim = [](std::string text) {
    while (!text.empty() && text.back() == ' ') text.pop_back();
    while (!text.empty() && text.front() == ' ') text.erase(text.begin());
    return text;
  };
  Setting setting{trim(assignment.substr(0, equals)), {}, "--set "};
  const std::string text = trim(assignment.substr(equals + 1));
  try {
    const toml::table parsed = toml::parse("value = " + text);
    if (parsed.size() == 1 && parsed.contains("value")) {
      setting.value = value_of(*parsed.get("value"), "--set " + assignment);
      return setting;
    }
  } catch (const toml::parse_error&) {
    // Not a TOML value: a number as C writes it (.2), or a bare string.
  }
  char* end = nullptr;
  const double number = std::strtod(text.c_str(), &end);
  if (!text.empty() && end == text.c_str() + text.size()) {
    setting.value = number;
  } else {
    setting.value = text;
  }
  return setting;
}

void refuse_second_preset(const Settings& settings) {
  for (const Setting& setting : settings) {
    if (setting.key != "preset") continue;
    throw Error(fmt::format("{}preset = {}: the preset is named already", setting.where,
                            value_text(setting.value)));
  }
}

Config parse_config(const Catalog& catalog, const std::string& name, std::string_view text,
                    const std::vector<std::string>& sets, ConfigScope scope) {
  toml::table root;
  try {
    root = toml::parse(text, name);
  } catch (const toml::parse_error& error) {
    throw Error(fmt::format("{} line {}: not valid TOML: {}", name, error.source().begin.line,
                            error.description()));
  }
  Config config;
  Settings renderer;
  bool has_loss = false;
  for_each_table(root, name, scope, [&](const std::string& path, const toml::table& table) {
    has_loss |= path == "trainer.loss";
    (path == "trainer.loss" ? config.loss : renderer) = settings_of(table, name, path);
  });
  if (!has_loss && scope == ConfigScope::loss_only) {
    throw Error(fmt::format("{}: has no [trainer.loss] table", name));
  }
  for (const std::string& assignment : sets) {
    Setting setting = parse_assignment(assignment);
    auto take = [&](const std::string& prefix, Settings& into) {
      if (!setting.key.starts_with(prefix)) return false;
      setting.key.erase(0, prefix.size());
      setting.where = "--set " + prefix;
      into.push_back(setting);
      return true;
    };
    if (take("trainer.loss.", config.loss)) continue;
    if (scope == ConfigScope::loss_only) {
      config.loss.push_back(std::move(setting));
      continue;
    }
    if (take("orchestrator.renderer.", renderer)) continue;
    const std::string tail = setting.key.substr(setting.key.rfind('.') + 1);
    throw Error(fmt::format("--set {} = {}: unknown key; write the whole path: trainer.loss.{}",
                            setting.key, value_text(setting.value), tail));
  }
  config.renderer = read_renderer(renderer);

  std::string preset_origin = "default";
  for (const Setting& setting : config.loss) {
    if (setting.key != "preset") continue;
    const auto* preset = std::get_if<std::string>(&setting.value);
    if (preset == nullptr) {
      throw Error(
          fmt::format("{}preset = {}: must be text", setting.where, value_text(setting.value)));
    }
    config.preset = *preset;
    preset_origin = setting.where;
  }
  try {
    config.loss_spec = catalog.make_spec(config.preset, config.loss);
  } catch (const Error& error) {
    const std::string message = error.what();
    // A bad name is reported without a place: give it the one the name stands at.
    if (message.starts_with("preset \"") && preset_origin != "default") {
      throw Error(preset_origin.substr(0, preset_origin.find(": ")) + ": trainer.loss." + message);
    }
    throw;
  }

  auto origin_text = [](const std::string& where) {
    return where.starts_with("--set") ? std::string("--set") : where.substr(0, where.find(": "));
  };
  auto origin_of = [&](const std::string& key,
                       const Settings& settings) -> std::pair<std::string, std::string> {
    std::pair<std::string, std::string> found{"", "default"};
    for (const Setting& setting : settings) {
      if (setting.key == key) found = {toml_text(setting.value), origin_text(setting.where)};
    }
    return found;
  };
  config.effective.push_back(
      {"trainer.loss.preset", fmt::format("\"{}\"", config.preset),
       preset_origin == "default" ? preset_origin : origin_text(preset_origin)});
  for (const auto& [key, value] : config.loss_spec.settings) {
    auto [given, origin] = origin_of(key, config.loss);
    if (given.empty()) {
      const bool number = value.find_first_not_of("0123456789.eE+-") == std::string::npos ||
                          value == "true" || value == "false";
      given = value == "infinity" ? "inf" : number ? value : fmt::format("\"{}\"", value);
    }
    config.effective.push_back({"trainer.loss." + key, given, origin});
  }
  for (const std::string& key : config.loss_spec.inert) {
    const auto [given, origin] = origin_of(key, config.loss);
    config.effective.push_back({"trainer.loss." + key, given, origin + ", inert"});
  }
  if (!config.renderer.name.empty()) {
    auto add = [&](const char* key, const std::string& value) {
      config.effective.push_back(
          {std::string("orchestrator.renderer.") + key, value, origin_of(key, renderer).second});
    };
    auto flag = [](bool on) { return on ? "true" : "false"; };
    add("name", toml_text(config.renderer.name));
    add("preserve_all_thinking", flag(config.renderer.preserve_all_thinking));
    add("preserve_thinking_between_tool_calls",
        flag(config.renderer.preserve_thinking_between_tool_calls));
  }
  return config;
}

std::string config_toml(const Config& config) {
  std::string out, table;
  for (const EffectiveValue& value : config.effective) {
    const size_t dot = value.key.rfind('.');
    if (value.key.substr(0, dot) != table) {
      table = value.key.substr(0, dot);
      out += fmt::format("{}[{}]\n", out.empty() ? "" : "\n", table);
    }
    const std::string line = fmt::format("{} = {}", value.key.substr(dot + 1), value.value);
    out += fmt::format("{:<39} # {}\n", line, value.origin);
  }
  return out;
}

}  // namespace leeway
