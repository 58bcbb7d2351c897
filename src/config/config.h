// A run's configuration: strict TOML to typed values, with the origin of each value.
//
// Tables: `[trainer.loss]`, with `preset` and the keys of that preset, which `core` defines;
// `[orchestrator.renderer]`, the chat renderer and which past thinking it keeps; and those of
// run_config.h. Anything else is refused with file, line, key, value and the nearest valid name; so
// are keys that contradict each other or have no effect.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "config/run_config.h"
#include "leeway/error.h"
#include "leeway/presets.h"

namespace leeway {

// One effective value: `key` is the full path, `value` its TOML text, `origin` is "default",
// "--set" or "FILE line N".
struct EffectiveValue {
  std::string key, value, origin;
};

struct RendererConfig {
  std::string name;   // empty: not configured; "auto": by the model folder's chat template
  std::string where;  // place of the name, for messages
  // Both spellings of which past thinking is kept; read_run makes them agree.
  KeptThinking thinking_retention = KeptThinking::last;
  bool preserve_all_thinking = false;
  bool preserve_thinking_between_tool_calls = false;
};

struct Config {
  std::string preset = "icepop";
  std::string plugin;  // a library with presets and corrections of one's own, absolute; or empty
  Settings loss;       // in order: file first, then --set
  LossSpec loss_spec;
  RendererConfig renderer;
  RunConfig run;  // environments have their ids; empty without [[environment]]
  // Every key that has an effect, defaults written out, in the order of the dump.
  std::vector<EffectiveValue> effective;
  // For the user: keys of the file that --set or --unset leaves without effect, and that are
  // therefore dropped.
  std::vector<std::string> notes;
};

// Everything that is wrong with a configuration, in the order of the file, then of the command
// line. what() has one line per problem.
class ConfigError : public Error {
 public:
  ConfigError(std::vector<std::string> shown, size_t count);

  std::vector<std::string> problems;  // the first few
  size_t total;
};

// Which part of the file is read: everything, or only the [trainer.loss] table.
enum class ConfigScope { whole, loss_only };

// `text` is the file's content and `name` its path, also used in messages. `sets` are command-line
// assignments: "trainer.loss.key=value" (with loss_only, "key=value" is enough), "seed=3",
// "environment.0.max_length=9" (the number may be left out if there is one environment;
// "environment.N.name=.." with the next number adds one). `unsets` are keys and tables to remove
// from the file first: "sft", "trainer.schedule", "environment.1". Input paths are made absolute:
// those of the file are relative to its folder if they exist there; all others, including those of
// `sets`, are relative to the working directory. With loss_only, `renderer` and `run` keep their
// defaults. Throws ConfigError with all problems, or Error if the file is not valid TOML.
Config parse_config(const Catalog& catalog, const std::string& name, std::string_view text,
                    const std::vector<std::string>& sets, ConfigScope scope,
                    const std::vector<std::string>& unsets = {});

// "key=value" with a TOML value or a bare string. Throws Error without a key or an equals sign.
Setting parse_assignment(const std::string& assignment);

// Throws Error if `preset` is among the settings, for callers that already have a preset and would
// ignore a second one.
void refuse_second_preset(const Settings& settings);

// The effective configuration as TOML, each line with its origin in a comment. Parsing it gives the
// same values.
std::string config_toml(const Config& config);

// The full names of all keys: "seed", "trainer.max_steps", "environment.name" (without a number),
// and those of every preset and correction, "trainer.loss.eps_low".
std::vector<std::string> configuration_keys(const Catalog& catalog);

// The reference page of all tables and keys, docs/configuration.md.
std::string configuration_markdown(const Catalog& catalog);

}  // namespace leeway
