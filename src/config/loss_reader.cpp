#include "config/loss_reader.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <set>
#include <unordered_map>

#include "config/foreign_keys.h"
#include "leeway/error.h"

namespace leeway {

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

std::vector<const Given*> loss_part(const Document& document, ConfigScope scope) {
  std::vector<const Given*> part;
  for (const Given& given : document.values()) {
    if (given.path == "trainer.loss." || scope == ConfigScope::loss_only) part.push_back(&given);
  }
  return part;
}

namespace {

// Keys of the table that belong to no preset.
bool is_of_table(const std::string& key) { return key == "preset" || key == "plugin"; }

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
  bool any() const { return any_; }
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

// A preset's settings where nothing is given.
class PresetDefaults {
 public:
  PresetDefaults(const Catalog& catalog, const std::string& preset) {
    try {
      for (const auto& [key, value] : catalog.make_spec(preset, {}).settings) values_[key] = value;
    } catch (const Error&) {
      // There is no such preset, or it does not work without settings.
    }
  }
  bool has(const std::string& key) const { return values_.contains(key); }
  bool is_default(const Given& given) const {
    const auto found = values_.find(given.key);
    if (found == values_.end()) return false;
    const std::string& text = found->second;
    const Value value = to_value(given.value);
    if (const auto* word = std::get_if<std::string>(&value)) return *word == text;
    if (const auto* flag = std::get_if<bool>(&value)) return text == (*flag ? "true" : "false");
    char* end = nullptr;
    const double own = std::strtod(text.c_str(), &end);  // "infinity" is a number too
    return !text.empty() && *end == '\0' && own == std::get<double>(value);
  }
  // Whether the file gives all of them, as the config.toml of a run does.
  bool all_in_file(const std::vector<const Given*>& part) const {
    return std::all_of(values_.begin(), values_.end(), [&](const auto& own) {
      return std::any_of(part.begin(), part.end(), [&](const Given* given) {
        return given->in_file() && given->key == own.first;
      });
    });
  }

 private:
  std::map<std::string, std::string> values_;
};

// Keys of the file that the command line does not give too.
std::vector<const Given*> only_in_file(const std::vector<const Given*>& part) {
  std::vector<const Given*> only;
  for (const Given* given : part) {
    if (!given->in_file() || is_of_table(given->key)) continue;
    const bool again = std::any_of(part.begin(), part.end(), [&](const Given* other) {
      return !other->in_file() && other->key == given->key;
    });
    if (!again) only.push_back(given);
  }
  return only;
}

bool has_spec(const Catalog& catalog, const std::string& preset, const Settings& settings) {
  try {
    catalog.make_spec(preset, settings);
    return true;
  } catch (const Error&) {
    return false;
  }
}

// Records the keys of the file that are dropped when the command line names another preset:
//  - keys that the file's preset has and the new one has not;
//  - in a file with every key of its preset, as the config.toml of a run: keys that have their
//    default there while the new preset has another one. Such a value was written by the program,
//    not chosen by a person. If the new preset refuses the other keys without these, all of them
//    stay: `cispo` takes eps_low and eps_high only together, and a person may have set one of them.
void leave_behind(const Catalog& catalog, const PresetName& preset,
                  const std::vector<const Given*>& part, const Settings& settings,
                  Findings& findings) {
  const PresetKeys keys_in_file(catalog, preset.in_file), keys(catalog, preset.now);
  const PresetDefaults in_file(catalog, preset.in_file), now(catalog, preset.now);
  const std::vector<std::string> known = native_keys(catalog);
  // If --unset removed the preset, its name is not known here.
  const bool is_named = preset.given != nullptr;
  const bool is_written_out = is_named && in_file.all_in_file(part);
  const auto belongs_to_file = [&](const std::string& key) {
    return is_named ? keys_in_file.has(key)
                    : std::find(known.begin(), known.end(), key) != known.end();
  };
  std::set<std::string> defaults;
  Settings rest = settings;
  for (const Given* given : only_in_file(part)) {
    const bool is_other = belongs_to_file(given->key) && !keys.has(given->key);
    // A preset of another code base may be given any key: only its own have another default.
    const bool is_default = !is_other && is_written_out && in_file.is_default(*given) &&
                            !now.is_default(*given) && (now.has(given->key) || !keys.any());
    if (is_other) findings.taken_along.push_back({given->name(), preset.cause});
    if (is_default) defaults.insert(given->key);
    if (!is_other && !is_default) continue;
    std::erase_if(rest, [&](const Setting& setting) { return setting.key == given->key; });
  }
  if (defaults.empty() || !has_spec(catalog, preset.now, rest)) return;
  for (const Given* given : only_in_file(part)) {
    if (!defaults.contains(given->key)) continue;
    findings.taken_along.push_back(
        {given->name(), preset.cause, TakenAlong::Reason::other_default});
  }
}

}  // namespace

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
    leave_behind(catalog, preset, part, config.loss, findings);
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
  for (const Given* given : only_in_file(part)) {
    if (std::find(inert.begin(), inert.end(), given->key) == inert.end()) continue;
    findings.taken_along.push_back({given->name(), preset.cause});
  }
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
      const bool number =
          !value.empty() && (value.find_first_not_of("0123456789.eE+-") == std::string::npos ||
                             value == "true" || value == "false");
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

}  // namespace leeway
