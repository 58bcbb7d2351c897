#include "cli/command_tree.h"

#include <algorithm>

#include "config/config.h"

namespace leeway {
namespace {

// "TEXT:{cpu,cuda}" -> cpu, cuda: how CLI11 describes an option that takes members of a set.
std::vector<std::string> members_of(const std::string& type) {
  std::vector<std::string> members;
  const size_t open = type.find('{'), close = type.rfind('}');
  if (open == std::string::npos || close == std::string::npos || close < open) return members;
  const std::string inside = type.substr(open + 1, close - open - 1);
  for (size_t start = 0; start <= inside.size();) {
    const size_t comma = std::min(inside.find(',', start), inside.size());
    members.push_back(inside.substr(start, comma - start));
    start = comma + 1;
  }
  return members;
}

std::vector<std::string> preset_names(const Catalog& catalog) {
  std::vector<std::string> names;
  for (const PresetInfo& preset : catalog.presets()) names.push_back(preset.name);
  for (const ForeignPreset& preset : catalog.foreign()) names.push_back(preset.name);
  return names;
}

class TreeMaker {
 public:
  explicit TreeMaker(const Catalog& catalog)
      : presets_(preset_names(catalog)), keys_(configuration_keys(catalog)) {}

  CommandEntry make(const CLI::App& app, const std::string& before) const {
    CommandEntry entry;
    entry.name = app.get_name();
    entry.path = before.empty() ? entry.name : before + " " + entry.name;
    entry.meaning = app.get_description();
    for (const CLI::Option* option : app.get_options()) {
      OptionEntry made = option_of(*option, entry.path);
      (made.positional ? entry.positionals : entry.options).push_back(std::move(made));
    }
    for (const CLI::App* below : app.get_subcommands({})) {
      entry.commands.push_back(make(*below, entry.path));
    }
    return entry;
  }

 private:
  OptionEntry option_of(const CLI::Option& option, const std::string& path) const {
    OptionEntry entry;
    for (const std::string& name : option.get_snames()) entry.names.push_back("-" + name);
    for (const std::string& name : option.get_lnames()) entry.names.push_back("--" + name);
    entry.positional = entry.names.empty();
    if (entry.positional) entry.names.push_back(option.get_name(true));
    entry.takes_value = entry.positional || option.get_items_expected_max() != 0;
    entry.required = option.get_required();
    entry.many = option.get_items_expected_max() > 1;
    entry.meaning = option.get_description();
    if (!entry.takes_value) return entry;
    entry.type = option.get_type_name();
    if (entry.type.starts_with("TEXT:")) entry.type.erase(0, 5);
    entry.default_value = option.get_default_str();
    entry.values = values_of(entry, path);
    return entry;
  }

  ArgumentValues values_of(const OptionEntry& entry, const std::string& path) const {
    using Kind = ArgumentValues::Kind;
    const std::string& name = entry.names.back();
    const std::vector<std::string> members = members_of(entry.type);
    if (!members.empty()) return {Kind::words, members};
    if (name == "preset" || name == "--preset") return {Kind::words, presets_};
    const bool of_loss = path.starts_with("leeway loss ");
    if (entry.type == "KEY=VALUE") return {Kind::keys, of_loss ? loss_keys() : keys_};
    if (entry.type == "KEY") return {Kind::words, keys_};
    const bool number = entry.type.starts_with("INT") || entry.type.starts_with("UINT") ||
                        entry.type.starts_with("FLOAT");
    if (number || entry.type == "NAME" || entry.type == "COMMAND" || entry.type == "WORDS")
      return {};
    return {Kind::files, {}};
  }

  std::vector<std::string> loss_keys() const {
    const std::string table = "trainer.loss.";
    std::vector<std::string> keys;
    for (const std::string& key : keys_) {
      if (key.starts_with(table)) keys.push_back(key.substr(table.size()));
    }
    return keys;
  }

  std::vector<std::string> presets_, keys_;
};

void collect(const CommandEntry& entry, std::vector<const CommandEntry*>& out) {
  out.push_back(&entry);
  for (const CommandEntry& below : entry.commands) collect(below, out);
}

}  // namespace

std::string CommandEntry::summary() const { return meaning.substr(0, meaning.find('\n')); }

CommandEntry command_tree(const CLI::App& app, const Catalog& catalog) {
  return TreeMaker(catalog).make(app, "");
}

std::vector<const CommandEntry*> all_commands(const CommandEntry& root) {
  std::vector<const CommandEntry*> commands;
  collect(root, commands);
  return commands;
}

}  // namespace leeway
