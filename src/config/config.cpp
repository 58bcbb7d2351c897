#include "config/config.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <set>

#include "config/document.h"
#include "config/findings.h"
#include "config/loss_reader.h"
#include "config/run_reader.h"
#include "leeway/error.h"
#include "leeway/plugin.h"

namespace leeway {
namespace {

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
        one.cause + (one.reason == TakenAlong::Reason::other_default
                         ? " has other defaults for these keys, which the file has as its own "
                           "preset's defaults, so they are dropped (--set KEY=VALUE keeps one)"
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
