// Presets: from a name and settings to a `LossSpec`.
//
// Native presets (`icepop`, `grpo+tis`) are strict: an unknown, foreign, contradictory or inert key
// is refused with an Error that names where it stands, the key, its value and the remedy. Foreign
// presets (`slime/ppo+vanilla_tis`) take the keys of their code base as it does and list what has
// no effect in `LossSpec::inert`.
#pragma once

#include <deque>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "leeway/loss.h"

namespace leeway {

// A value as TOML, JSON or the command line gives it. monostate is JSON's null: as if not given.
using Value = std::variant<std::monostate, bool, double, std::string>;
std::string value_text(const Value& value);

// `where` is printed before the key: "run.toml line 12: trainer.loss.", "--set ", or nothing.
struct Setting {
  std::string key;
  Value value;
  std::string where;
};
using Settings = std::vector<Setting>;

enum class KeyType { number, number_or_off, choice };

// One key of a preset: the only definition of its type, default and range.
struct KeyInfo {
  std::string name;
  KeyType type = KeyType::number;
  std::string default_value;  // "0.2", "off", "prox"
  std::string meaning;
  Bounds range;                      // numbers
  bool open_low = false;             // the range's lower end is excluded
  std::vector<std::string> choices;  // choice
};

// Typed, validated values of a preset's keys; every key has one, given or default.
class KeyValues {
 public:
  double number(std::string_view key) const;
  std::optional<double> number_or_off(std::string_view key) const;
  const std::string& text(std::string_view key) const;
  bool given(std::string_view key) const;
  // Throws Error about `key`, naming it as the user wrote it.
  [[noreturn]] void refuse(std::string_view key, const std::string& problem) const;

  struct Entry {
    const KeyInfo* info;
    std::optional<double> number;  // empty: off, or a choice
    std::string text;
    bool given = false;
    std::string where;
  };
  std::vector<Entry> entries;

 private:
  const Entry& find(std::string_view key) const;
};

struct PresetInfo {
  std::string name;
  std::string origin;   // which code base or paper it comes from
  std::string summary;  // one line
  std::vector<KeyInfo> keys;
  std::function<LossSpec(const KeyValues&)> build;
};

struct CorrectionInfo {
  std::string name;
  std::string origin;
  std::string summary;
  std::vector<KeyInfo> keys;
  std::function<Correction(const KeyValues&)> build;
};

struct ForeignPreset {
  std::string name;    // "verl/vanilla+IS"
  std::string source;  // where its formula is defined
};

// The presets, corrections and own metrics known to a program. Copyable; a user's program adds its
// own and then makes specs from it. Reading is thread-safe, `add` is not.
class Catalog {
 public:
  Catalog();

  // Registers a correction under a new name, usable as `BASE+name`. Throws Error if the name or one
  // of its keys is taken.
  void add(CorrectionInfo correction);

  // Registers a preset under a new name. Its keys may have the names of other presets' keys, which
  // then are its own. Throws Error if the name, or one of its keys among the corrections', is
  // taken.
  void add(PresetInfo preset);

  // Registers a metric under a new name; every spec made afterwards has it. Throws Error if the
  // name is taken, or is not made of lower-case letters, digits and underscores.
  void add(OwnMetric metric);

  const std::deque<PresetInfo>& presets() const { return presets_; }
  const std::deque<CorrectionInfo>& corrections() const { return corrections_; }
  const std::vector<ForeignPreset>& foreign() const { return foreign_; }
  const std::vector<OwnMetric>& metrics() const { return metrics_; }
  static std::span<const KeyInfo> common_keys();  // adv_tau, reduction, ..: accepted everywhere

  // Throws Error for any problem with the name or the settings.
  LossSpec make_spec(std::string_view preset, const Settings& settings) const;

  // All native keys of `BASE[+CORRECTION..]`, common ones last.
  std::vector<const KeyInfo*> keys_of(std::string_view preset) const;

 private:
  struct Parts;
  Parts resolve(std::string_view preset) const;
  void check_key(const Setting& setting, std::string_view preset,
                 const std::vector<const KeyInfo*>& keys) const;

  std::deque<PresetInfo> presets_;
  std::deque<CorrectionInfo> corrections_;
  std::vector<ForeignPreset> foreign_;
  std::vector<OwnMetric> metrics_;
};

// The nearest of `names` to `word` by edit distance, or empty if none is near.
std::string nearest_name(std::string_view word, const std::vector<std::string>& names);

}  // namespace leeway
