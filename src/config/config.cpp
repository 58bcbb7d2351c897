#include "config/config.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <set>
#include <unordered_map>

#include "config/document.h"
#include "config/findings.h"
#include "config/foreign_keys.h"
#include "config/run_reader.h"
#include "leeway/error.h"
#include "leeway/plugin.h"

namespace leeway {
namespace {

std::vector<std::string> native_keys(const Catalog& catalog) {
  std::vector<std::string> names = {"preset", "plugin"};
  auto add = [&](std::span<const KeyInfo> keys) {
    for (const KeyInfo& key : keys) names.push_back(key.name);
  };
  add(Catalog::common_keys());
  for (const PresetInfo& preset : catalog.presets()) add(preset.keys);
  for (const CorrectionInfo& correction : catalog.corrections()) add(correction.keys);
  return names;
}

// Keys of the table that belong to no preset.
bool is_of_table(const std::string& key) { return key == "preset" || key == "plugin"; }

// The plugin that the file or the command line names, absolute; empty without one. It is looked for
// before anything else is read, since it decides which keys there are.
std::string plugin_of(const std::string& name, const toml::table& root,
                      const std::vector<std::string>& sets, ConfigScope scope) {
  namespace fs = std::filesystem;
  std::string plugin;
  if (const toml::node_view node = root["trainer"]["loss"]["plugin"]) {
    const auto* text = node.as_string();
    const auto line = node.node()->source().begin.line;
    if (text == nullptr || text->get().empty()) {
      throw Error(fmt::format("{} line {}: trainer.loss.plugin: must be the path of a library",
                              name, line));
    }
    const fs::path beside = fs::path(name).parent_path() / text->get();
    plugin = fs::exists(beside) ? beside.string() : text->get();
  }
  for (const std::string& set : sets) {
    const std::string key = set.substr(0, set.find('='));
    if (key != "trainer.loss.plugin" && (key != "plugin" || scope != ConfigScope::loss_only))
      continue;
    const Value value = parse_assignment(set).value;
    const auto* text = std::get_if<std::string>(&value);
    if (text == nullptr || text->empty()) {
      throw Error(fmt::format("--set {}: must be the path of a library", set));
    }
    plugin = *text;
  }
  return plugin.empty() ? plugin : fs::absolute(plugin).lexically_normal().string();
}

// The loss settings of the document, in order. With loss_only the document has no others.
std::vector<const Given*> loss_part(const Document& document, ConfigScope scope) {
  std::vector<const Given*> part;
  for (const Given& given : document.values()) {
    if (given.path == "trainer.loss." || scope == ConfigScope::loss_only) part.push_back(&given);
  }
  return part;
}

// The keys of a preset. Presets of other code bases may have any key.
class PresetKeys {
 public:
  PresetKeys(const Catalog& catalog, const std::string& preset)
      : any_(preset.find('/') != std::string::npos) {
    if (any_) return;
    try {
      for (const KeyInfo* key : catalog.keys_of(preset)) names_.insert(key->name);
      names_.insert("preset");
      names_.insert("plugin");
    } catch (const Error&) {
      // There is no such preset, so it has no keys.
    }
  }
  bool has(const std::string& key) const { return any_ || names_.contains(key); }

 private:
  bool any_;
  std::set<std::string> names_;
};

// The preset as the file names it, and the effective one.
struct PresetName {
  std::string in_file = Config().preset, now = Config().preset;
  const Given* given = nullptr;
  std::string cause;  // the command-line option that changed it; empty if none did
};

PresetName preset_name(const Document& document, const std::vector<const Given*>& part,
                       Problems& problems) {
  PresetName name;
  for (const Given* given : part) {
    if (given->key != "preset") continue;
    const auto* text = std::get_if<std::string>(&given->value);
    if (text == nullptr) {
      problems.add(*given, "must be text");
      continue;
    }
    name.now = *text;
    name.given = given;
    if (given->in_file()) name.in_file = *text;
  }
  if (name.given != nullptr && !name.given->in_file()) {
    name.cause = fmt::format("--set {} = {}", name.given->name(), toml_string(name.now));
  } else if (name.given == nullptr) {
    name.cause = document.command_line("trainer.loss.preset");
  }
  return name;
}

// Records keys of the file for which `inert` holds, unless the command line sets them too.
template <class Inert>
void take_along(const PresetName& preset, const std::vector<const Given*>& part, Inert&& inert,
                Findings& findings, bool are_defaults = false) {
  for (const Given* given : part) {
    if (!given->in_file() || is_of_table(given->key) || !inert(*given)) continue;
    const bool again = std::any_of(part.begin(), part.end(), [&](const Given* other) {
      return !other->in_file() && other->key == given->key;
    });
    if (!again) findings.taken_along.push_back({given->name(), preset.cause, are_defaults});
  }
}

// A preset's keys as they are where nothing is given.
class PresetDefaults {
 public:
  PresetDefaults(const Catalog& catalog, const std::string& preset) {
    try {
      for (const auto& [key, value] : catalog.make_spec(preset, {}).settings) values_[key] = value;
    } catch (const Error&) {
      // There is no such preset, or it does not work without settings.
    }
  }
  bool has(const std::string& key, const Scalar& value) const {
    const auto found = values_.find(key);
    if (found == values_.end()) return false;
    const std::string& text = found->second;
    if (const auto* given = std::get_if<std::string>(&value)) return *given == text;
    if (const auto* given = std::get_if<bool>(&value)) return text == (*given ? "true" : "false");
    const double number = std::holds_alternative<int64_t>(value)
                              ? static_cast<double>(std::get<int64_t>(value))
                          : std::holds_alternative<double>(value) ? std::get<double>(value)
                                                                  : std::nan("");
    char* end = nullptr;
    const double own = std::strtod(text.c_str(), &end);  // "infinity" is a number too
    return !text.empty() && *end == '\0' && own == number;
  }

 private:
  std::map<std::string, std::string> values_;
};

// Returns false if the loss has problems; there is no spec then.
bool read_loss(const Catalog& catalog, const Document& document,
               const std::vector<const Given*>& part, Config& config, Findings& findings) {
  const size_t before = findings.problems.count();
  const PresetName preset = preset_name(document, part, findings.problems);
  if (findings.problems.count() > before) return false;
  config.preset = preset.now;
  for (const Given* given : part) {
    if (given->key == "plugin") continue;
    config.loss.push_back({given->key, to_value(given->value), given->where()});
  }
  const PresetKeys keys(catalog, preset.now);
  const std::vector<std::string> known = native_keys(catalog);
  if (!preset.cause.empty()) {
    const PresetKeys keys_in_file(catalog, preset.in_file);
    const auto of_the_other = [&](const Given& given) {
      // If --unset removed the preset, its name is not known here.
      const bool of_file = preset.given != nullptr
                               ? keys_in_file.has(given.key)
                               : std::find(known.begin(), known.end(), given.key) != known.end();
      return of_file && !keys.has(given.key);
    };
    take_along(preset, part, of_the_other, findings);
    if (!findings.taken_along.empty()) return false;
    // A run's config.toml has every default written out: those of the file's preset are not what
    // somebody wants of another one.
    const PresetDefaults in_file(catalog, preset.in_file), now(catalog, preset.now);
    const auto is_default = [&](const Given& given) {
      return in_file.has(given.key, given.value) && !now.has(given.key, given.value);
    };
    take_along(preset, part, is_default, findings, /*are_defaults=*/true);
    if (!findings.taken_along.empty()) return false;
  }
  // A problem names its key as given; removing that key reveals the next problem.
  Settings left = config.loss;
  for (;;) {
    std::string message;
    try {
      config.loss_spec = catalog.make_spec(config.preset, left);
      break;
    } catch (const Error& error) {
      message = error.what();
    }
    const Given* to_blame = nullptr;
    for (const Given* given : part) {
      if (message.starts_with(given->where() + given->key + " = ")) to_blame = given;
    }
    if (to_blame == nullptr) {
      // An unknown preset is reported without a place: add that of the name.
      const bool named = message.starts_with("preset \"") && preset.given != nullptr;
      findings.problems.add(preset.given == nullptr ? 0 : preset.given->order,
                            named ? preset.given->where() + message : message);
      return false;
    }
    const bool native = std::find(known.begin(), known.end(), to_blame->key) != known.end();
    if (!native && !keys.has(to_blame->key)) {
      const std::string hint = foreign_hint("trainer.loss." + to_blame->key);
      if (!hint.empty()) message += "; " + hint;
    }
    findings.problems.add(to_blame->order, message);
    findings.problems.blame(to_blame->name());
    std::erase_if(left, [&](const Setting& setting) { return setting.key == to_blame->key; });
    if (!findings.problems.full()) continue;
    // Further problems are only counted.
    for (const Setting& setting : left) {
      if (!keys.has(setting.key)) {
        findings.problems.add(to_blame->order, setting.where + setting.key + ": unknown key");
      }
    }
    return false;
  }
  if (findings.problems.count() > before) return false;
  if (preset.cause.empty()) return true;
  const std::vector<std::string>& inert = config.loss_spec.inert;
  const auto is_inert = [&](const Given& given) {
    return std::find(inert.begin(), inert.end(), given.key) != inert.end();
  };
  take_along(preset, part, is_inert, findings);
  return findings.taken_along.empty();
}

std::vector<EffectiveValue> loss_values(const std::vector<const Given*>& part,
                                        const Config& config) {
  std::vector<EffectiveValue> values;
  std::unordered_map<std::string, const Given*> last;
  for (const Given* given : part) last[given->key] = given;
  // The last given value of a key, and its origin.
  auto given_of = [&](const std::string& key) -> std::pair<std::string, std::string> {
    const auto found = last.find(key);
    if (found == last.end()) return {"", "default"};
    return {scalar_text(found->second->value), found->second->place};
  };
  values.push_back({"trainer.loss.preset", toml_string(config.preset), given_of("preset").second});
  if (!config.plugin.empty()) {
    values.push_back(
        {"trainer.loss.plugin", toml_string(config.plugin), given_of("plugin").second});
  }
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
    throw Error(fmt::format("{}preset = {}: the preset is already set", setting.where,
                            value_text(setting.value)));
  }
}

namespace {

// One note per command-line option that leaves keys without effect, and one per preset on the
// command line that has other defaults.
void note_taken_along(const Document& document, const std::vector<TakenAlong>& taken,
                      std::vector<std::string>& notes) {
  std::vector<std::string> causes;
  std::map<std::string, std::vector<std::string>> keys;
  for (const TakenAlong& one : taken) {
    const Given* given = document.find(one.name);
    const std::string cause =
        one.cause + (one.is_default
                         ? " has other defaults for these keys, which the file has as its own "
                           "preset's defaults, so they are dropped"
                         : " leaves these keys without effect, so they are dropped");
    if (keys[cause].empty()) causes.push_back(cause);
    keys[cause].push_back(
        fmt::format("{} = {} ({})", one.name, scalar_text(given->value), given->place));
  }
  for (const std::string& cause : causes) {
    const std::vector<std::string>& all = keys[cause];
    constexpr size_t kMostNamed = 20;
    const size_t named = std::min(all.size(), kMostNamed);
    notes.push_back(
        fmt::format("{}: {}{}", cause, fmt::join(all.begin(), all.begin() + named, ", "),
                    named == all.size() ? "" : fmt::format(", and {} more", all.size() - named)));
  }
}

}  // namespace

Config parse_config(const Catalog& built_in, const std::string& name, std::string_view text,
                    const std::vector<std::string>& sets, ConfigScope scope,
                    const std::vector<std::string>& unsets) {
  RunConfig default_run;
  RendererConfig default_renderer;
  EnvironmentTable environment;
  Problems of_text;
  toml::table root = parse_toml(name, text);
  remove_unset(root, name, unsets, scope, of_text);
  Catalog catalog = built_in;
  const std::string plugin = plugin_of(name, root, sets, scope);
  if (!plugin.empty()) load_plugin(plugin, catalog);
  const Known known{describe(default_run, default_renderer), describe(environment, 0),
                    native_keys(catalog)};
  Document document = read_document(known, name, root, scope, of_text);
  for (const std::string& unset : unsets) {
    // Removing a list element renumbers the others, and nothing depends on what is gone.
    if (!unset.starts_with("environment")) document.unset.push_back(unset);
  }
  if (scope == ConfigScope::loss_only && !document.has_table("trainer.loss")) {
    throw Error(fmt::format("{}: has no [trainer.loss] table", name));
  }
  uint64_t order = kOrderOfSet;
  for (const std::string& assignment : sets) {
    ++order;
    of_text.attempt(order, [&] { add_assignment(known, assignment, scope, order, document); });
  }
  std::vector<std::string> notes;
  for (;;) {
    Config config;
    config.plugin = plugin;
    Findings findings{of_text, {}};
    if (scope == ConfigScope::whole) read_run(document, config.run, config.renderer, findings);
    const std::vector<const Given*> loss = loss_part(document, scope);
    const bool has_loss = read_loss(catalog, document, loss, config, findings);
    if (scope == ConfigScope::whole) {
      check_run(document, config.run, has_loss ? &config.loss_spec : nullptr, findings);
    }
    if (!findings.taken_along.empty()) {
      // Without these keys the rest may be judged differently.
      note_taken_along(document, findings.taken_along, notes);
      std::set<std::string> names;
      for (const TakenAlong& one : findings.taken_along) names.insert(one.name);
      document.remove(names);
      continue;
    }
    findings.problems.throw_if_any();
    config.effective = loss_values(loss, config);
    if (scope == ConfigScope::whole) {
      resolve_paths(document, name, config.run, config.renderer);
      decide_automatic(config.run);
      config.effective = effective_values(document, config.run, config.renderer, config.effective);
    }
    config.notes = std::move(notes);
    return config;
  }
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
    // A file name may contain anything, but a comment must not contain control characters.
    std::string origin = value.origin;
    for (char& c : origin) {
      if (static_cast<unsigned char>(c) < 0x20 || c == '\x7f') c = '?';
    }
    out += fmt::format("{:<39} # {}\n", fmt::format("{} = {}", key, value.value), origin);
  }
  return out;
}

std::vector<std::string> configuration_keys(const Catalog& catalog) {
  RunConfig run;
  RendererConfig renderer;
  EnvironmentTable environment;
  std::vector<std::string> names;
  for (const Section& section : describe(run, renderer)) {
    for (const Field& field : section.fields) names.push_back(section.prefix() + field.key);
  }
  for (const Field& field : describe(environment, 0).fields) {
    names.push_back("environment." + field.key);
  }
  std::set<std::string> of_loss;
  for (const std::string& key : native_keys(catalog)) of_loss.insert("trainer.loss." + key);
  names.insert(names.end(), of_loss.begin(), of_loss.end());
  return names;
}

}  // namespace leeway
