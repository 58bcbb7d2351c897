// Catalog: turns names into specs, with the strictness of native presets.

#include "leeway/presets.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "core/foreign/foreign.h"
#include "core/native_presets.h"
#include "core/spec_text.h"
#include "leeway/error.h"

namespace leeway {
namespace {

[[noreturn]] void refuse_setting(const Setting& setting, const std::string& problem) {
  throw Error(
      fmt::format("{}{} = {}: {}", setting.where, setting.key, value_text(setting.value), problem));
}

std::string range_text(const KeyInfo& key) {
  std::string text;
  if (key.range.low > -kInfinity) {
    text = fmt::format("{} {}", key.open_low ? "above" : "at least", number_text(key.range.low));
  }
  if (key.range.high < kInfinity) {
    text += fmt::format("{}at most {}", text.empty() ? "" : " and ", number_text(key.range.high));
  }
  return text;
}

KeyValues::Entry default_entry(const KeyInfo& key) {
  KeyValues::Entry entry{&key, {}, key.default_value, false, ""};
  if (key.type != KeyType::choice && key.default_value != "off") {
    entry.number = std::stod(key.default_value);
  }
  return entry;
}

KeyValues::Entry parse_entry(const KeyInfo& key, const Setting& setting) {
  KeyValues::Entry entry{&key, {}, value_text(setting.value), true, setting.where};
  const auto* text = std::get_if<std::string>(&setting.value);
  if (key.type == KeyType::choice) {
    const std::string allowed = fmt::format("one of {}", fmt::join(key.choices, ", "));
    if (text == nullptr) refuse_setting(setting, "must be text, " + allowed);
    if (std::find(key.choices.begin(), key.choices.end(), *text) == key.choices.end()) {
      refuse_setting(setting, "must be " + allowed);
    }
    entry.text = *text;
    return entry;
  }
  if (text != nullptr && key.type == KeyType::number_or_off && *text == "off") {
    entry.text = *text;
    return entry;
  }
  const auto* number = std::get_if<double>(&setting.value);
  if (number == nullptr) {
    refuse_setting(setting, key.type == KeyType::number_or_off ? "must be a number or \"off\""
                                                               : "must be a number");
  }
  // Infinity is a bound that never acts; it is only meaningful next to another bound.
  const bool may_be_infinite = key.name.ends_with("_ratio_high") || key.name == "ratio_high" ||
                               key.name.ends_with("eps_high") || key.name == "tis_cap";
  if (std::isnan(*number) || (std::isinf(*number) && !may_be_infinite)) {
    refuse_setting(setting, std::isnan(*number) ? "must be a number"
                                                : "infinity would make it inert: must be finite");
  }
  const bool too_low = key.open_low ? *number <= key.range.low : *number < key.range.low;
  if (too_low || *number > key.range.high) {
    refuse_setting(setting, "must be " + range_text(key));
  }
  entry.number = *number;
  return entry;
}

size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t up = row[j];
      row[j] = std::min({up + 1, row[j - 1] + 1, diagonal + (a[i - 1] != b[j - 1])});
      diagonal = up;
    }
  }
  return row[b.size()];
}

}  // namespace

std::string nearest_name(std::string_view word, const std::vector<std::string>& names) {
  std::string best;
  // Short words are close to anything, so two-letter words are never treated as typos.
  size_t best_distance = word.size() <= 2   ? 1
                         : word.size() == 3 ? 2
                                            : std::max<size_t>(2, word.size() / 3) + 1;
  for (const std::string& name : names) {
    const size_t distance = edit_distance(word.substr(0, 64), name);
    if (distance < best_distance) best_distance = distance, best = name;
  }
  return best;
}

std::string value_text(const Value& value) {
  if (const auto* flag = std::get_if<bool>(&value)) return *flag ? "true" : "false";
  if (const auto* number = std::get_if<double>(&value)) return number_text(*number);
  if (const auto* text = std::get_if<std::string>(&value)) return "\"" + *text + "\"";
  return "null";
}

const KeyValues::Entry& KeyValues::find(std::string_view key) const {
  for (const Entry& entry : entries) {
    if (entry.info->name == key) return entry;
  }
  LEEWAY_CHECK(false, fmt::format("preset reads the undeclared key {}", key));
}

double KeyValues::number(std::string_view key) const {
  const Entry& entry = find(key);
  LEEWAY_CHECK(entry.number.has_value(), fmt::format("{} is a number", key));
  return *entry.number;
}
std::optional<double> KeyValues::number_or_off(std::string_view key) const {
  return find(key).number;
}
const std::string& KeyValues::text(std::string_view key) const { return find(key).text; }
bool KeyValues::given(std::string_view key) const { return find(key).given; }

void KeyValues::refuse(std::string_view key, const std::string& problem) const {
  const Entry& entry = find(key);
  const std::string value = entry.number ? number_text(*entry.number) : "\"" + entry.text + "\"";
  throw Error(fmt::format("{}{} = {}{}: {}", entry.where, key, value,
                          entry.given ? "" : " (the default)", problem));
}

struct Catalog::Parts {
  const PresetInfo* base = nullptr;
  std::vector<const CorrectionInfo*> corrections;
};

Catalog::Catalog()
    : presets_(native_presets()), corrections_(native_corrections()), foreign_(foreign_presets()) {}

void Catalog::add(CorrectionInfo correction) {
  for (const PresetInfo& preset : presets_) {
    if (preset.name == correction.name) {
      throw Error(fmt::format("correction {}: a preset has this name already", correction.name));
    }
  }
  for (const CorrectionInfo& known : corrections_) {
    if (known.name == correction.name) {
      throw Error(fmt::format("correction {}: the name is taken already", correction.name));
    }
  }
  auto refuse_taken = [&](const std::vector<KeyInfo>& keys, const std::string& owner) {
    for (const KeyInfo& mine : correction.keys) {
      for (const KeyInfo& theirs : keys) {
        if (mine.name == theirs.name) {
          throw Error(fmt::format("correction {}: its key {} belongs to {}", correction.name,
                                  mine.name, owner));
        }
      }
    }
  };
  for (const PresetInfo& preset : presets_) refuse_taken(preset.keys, preset.name);
  for (const CorrectionInfo& known : corrections_) refuse_taken(known.keys, known.name);
  const auto common = common_keys();
  refuse_taken({common.begin(), common.end()}, "every preset");
  corrections_.push_back(std::move(correction));
}

void Catalog::add(PresetInfo preset) {
  if (preset.name.empty() || preset.name.find_first_of("+/") != std::string::npos) {
    throw Error(fmt::format("preset \"{}\": a name has no plus sign and no slash", preset.name));
  }
  for (const PresetInfo& known : presets_) {
    if (known.name == preset.name) {
      throw Error(fmt::format("preset {}: the name is taken already", preset.name));
    }
  }
  const auto refuse_key = [&](std::span<const KeyInfo> keys, const std::string& owner) {
    for (const KeyInfo& mine : preset.keys) {
      for (const KeyInfo& theirs : keys) {
        if (mine.name != theirs.name) continue;
        throw Error(
            fmt::format("preset {}: its key {} belongs to {}", preset.name, mine.name, owner));
      }
    }
  };
  for (const CorrectionInfo& known : corrections_) {
    if (known.name == preset.name) {
      throw Error(fmt::format("preset {}: a correction has this name already", preset.name));
    }
    refuse_key(known.keys, "+" + known.name);
  }
  refuse_key(common_keys(), "every preset");
  presets_.push_back(std::move(preset));
}

Catalog::Parts Catalog::resolve(std::string_view name) const {
  std::vector<std::string> words;
  size_t start = 0;
  for (size_t plus; (plus = name.find('+', start)) != std::string_view::npos; start = plus + 1) {
    words.emplace_back(name.substr(start, plus - start));
  }
  words.emplace_back(name.substr(start));

  auto correction = [&](const std::string& word) -> const CorrectionInfo* {
    for (const CorrectionInfo& c : corrections_) {
      if (c.name == word) return &c;
    }
    return nullptr;
  };
  std::vector<std::string> bases, extras;
  for (const PresetInfo& p : presets_) bases.push_back(p.name);
  for (const CorrectionInfo& c : corrections_) extras.push_back(c.name);
  auto suggest = [](const std::string& word, const std::vector<std::string>& names) {
    const std::string near = nearest_name(word, names);
    return near.empty() ? std::string("see `leeway loss list`") : "did you mean " + near + "?";
  };

  // A correction alone implies the REINFORCE base only if that combination is a method of its own.
  if (words.front() == "off_policy_is") words.insert(words.begin(), "reinforce");
  Parts parts;
  for (const PresetInfo& p : presets_) {
    if (p.name == words.front()) parts.base = &p;
  }
  if (parts.base == nullptr) {
    if (correction(words.front()) != nullptr) {
      throw Error(fmt::format("preset \"{}\": {} is a correction; put it on a base, e.g. ppo+{}",
                              name, words.front(), words.front()));
    }
    std::vector<std::string> all = bases;
    for (const ForeignPreset& f : foreign_) all.push_back(f.name);
    throw Error(fmt::format("preset \"{}\": there is no preset {}; {}", name, words.front(),
                            suggest(words.front(), all)));
  }
  if (words.size() > 3) {
    throw Error(fmt::format("preset \"{}\": at most two corrections can stand on a base", name));
  }
  for (size_t k = 1; k < words.size(); ++k) {
    if (words[k].empty()) {
      throw Error(fmt::format("preset \"{}\": there is no correction after the plus sign", name));
    }
    const CorrectionInfo* found = correction(words[k]);
    if (found == nullptr) {
      throw Error(fmt::format("preset \"{}\": there is no correction {}; {}", name, words[k],
                              suggest(words[k], extras)));
    }
    if (std::find(parts.corrections.begin(), parts.corrections.end(), found) !=
        parts.corrections.end()) {
      throw Error(fmt::format("preset \"{}\": {} occurs twice", name, words[k]));
    }
    parts.corrections.push_back(found);
  }
  return parts;
}

std::vector<const KeyInfo*> Catalog::keys_of(std::string_view preset) const {
  const Parts parts = resolve(preset);
  std::vector<const KeyInfo*> keys;
  for (const KeyInfo& key : parts.base->keys) keys.push_back(&key);
  for (const CorrectionInfo* correction : parts.corrections) {
    for (const KeyInfo& key : correction->keys) keys.push_back(&key);
  }
  for (const KeyInfo& key : common_keys()) keys.push_back(&key);
  return keys;
}

// Refuses a key that the preset does not have, with the most helpful hint available.
void Catalog::check_key(const Setting& setting, std::string_view preset,
                        const std::vector<const KeyInfo*>& keys) const {
  std::vector<std::string> names;
  for (const KeyInfo* key : keys) {
    if (key->name == setting.key) return;
    names.push_back(key->name);
  }
  if (const auto renamed = renamed_keys().find(setting.key); renamed != renamed_keys().end()) {
    refuse_setting(setting, fmt::format("preset {} has no such key; {} {}", preset, setting.key,
                                        renamed->second));
  }
  std::vector<std::string> owners;
  auto owns = [&](const std::vector<KeyInfo>& owned, const std::string& owner) {
    for (const KeyInfo& key : owned) {
      if (key.name == setting.key) owners.push_back(owner);
    }
  };
  for (const PresetInfo& p : presets_) owns(p.keys, p.name);
  for (const CorrectionInfo& c : corrections_) owns(c.keys, "+" + c.name);
  if (!owners.empty()) {
    refuse_setting(setting, fmt::format("preset {} has no such key; it belongs to {}", preset,
                                        fmt::join(owners, ", ")));
  }
  const std::string near = nearest_name(setting.key, names);
  refuse_setting(
      setting, near.empty()
                   ? fmt::format("unknown key; preset {} takes {}", preset, fmt::join(names, ", "))
                   : fmt::format("unknown key of preset {}; did you mean {}?", preset, near));
}

void Catalog::add(OwnMetric metric) {
  const bool well_named =
      !metric.name.empty() && std::all_of(metric.name.begin(), metric.name.end(), [](char c) {
        return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_';
      });
  if (!well_named) {
    throw Error(
        fmt::format("metric \"{}\": a name is made of lower-case letters, digits and underscores",
                    metric.name));
  }
  if (!metric.share) throw Error(fmt::format("metric {}: it has no function", metric.name));
  for (const OwnMetric& known : metrics_) {
    if (known.name == metric.name) {
      throw Error(fmt::format("metric {}: the name is taken already", metric.name));
    }
  }
  metrics_.push_back(std::move(metric));
}

LossSpec Catalog::make_spec(std::string_view preset, const Settings& settings) const {
  if (preset.find('/') != std::string_view::npos) {
    LossSpec spec = make_foreign_spec(preset, settings);
    spec.metrics = metrics_;
    return spec;
  }
  const Parts parts = resolve(preset);
  const std::vector<const KeyInfo*> keys = keys_of(preset);

  // The last value of a key wins: `--set` may follow a file.
  std::map<std::string, const Setting*> given;
  for (const Setting& setting : settings) {
    if (setting.key == "preset") continue;
    check_key(setting, preset, keys);
    given[setting.key] = &setting;
  }
  KeyValues values;
  for (const KeyInfo* key : keys) {
    const auto found = given.find(key->name);
    values.entries.push_back(found == given.end() ? default_entry(*key)
                                                  : parse_entry(*key, *found->second));
  }

  LossSpec spec = parts.base->build(values);
  for (const CorrectionInfo* correction : parts.corrections) {
    spec.corrections.push_back(correction->build(values));
  }
  spec.preset = std::string(preset);
  spec.metrics = metrics_;
  apply_common_keys(values, spec);
  for (const KeyValues::Entry& entry : values.entries) {
    // An absolute bound that is replaced by distances from one is printed as off, so that the
    // output means the same when read again.
    std::string eps = entry.info->name;
    const size_t at = eps.rfind("ratio_");
    if (at != std::string::npos) eps.replace(at, 6, "eps_");
    const bool replaced =
        at != std::string::npos && std::any_of(values.entries.begin(), values.entries.end(),
                                               [&](const KeyValues::Entry& other) {
                                                 return other.info->name == eps && other.given &&
                                                        other.number;
                                               });
    spec.settings.emplace_back(entry.info->name, replaced       ? "off"
                                                 : entry.number ? number_text(*entry.number)
                                                                : entry.text);
  }
  return spec;
}

}  // namespace leeway
