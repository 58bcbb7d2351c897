// A run's configuration: strict TOML to typed values, with where each value came from.
//
// Tables: `[trainer.loss]`, `preset` and the keys of that preset, whose table `core` owns; and
// `[orchestrator.renderer]`, the chat renderer and which past thinking it keeps. Anything else is
// refused with file, line, key, value and the nearest valid name.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "leeway/presets.h"

namespace leeway {

// One effective value: `key` is the full path, `value` its TOML text, `origin` is "default",
// "--set" or "FILE line N".
struct EffectiveValue {
  std::string key, value, origin;
};

struct RendererConfig {
  std::string name;   // empty: none configured
  std::string where;  // of the name, for messages
  bool preserve_all_thinking = false;
  bool preserve_thinking_between_tool_calls = false;
};

struct Config {
  std::string preset = "icepop";
  Settings loss;  // as given, file first, then --set
  LossSpec loss_spec;
  RendererConfig renderer;
  std::vector<EffectiveValue> effective;  // every key, defaults written out
};

// What of the file is looked at: everything, or the [trainer.loss] table alone.
enum class ConfigScope { whole, loss_only };

// `text` is the file's content, `name` what messages call it; `sets` are command-line assignments
// "trainer.loss.key=value" (with loss_only, "key=value" is enough). Throws Error.
Config parse_config(const Catalog& catalog, const std::string& name, std::string_view text,
                    const std::vector<std::string>& sets, ConfigScope scope);

// "key=value" with a TOML value or a bare string. Throws Error without a key or an equals sign.
Setting parse_assignment(const std::string& assignment);

// Throws Error if `preset` is among the settings: where it is named already, a second one would be
// ignored.
void refuse_second_preset(const Settings& settings);

// The effective configuration as TOML, each line with its origin in a comment.
std::string config_toml(const Config& config);

}  // namespace leeway
