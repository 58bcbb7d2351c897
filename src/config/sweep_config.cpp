#include "config/sweep_config.h"

#include <fmt/format.h>
#include <toml++/toml.h>

#include <algorithm>

#include "config/given.h"
#include "leeway/error.h"

namespace leeway {
namespace {

constexpr const char* kNameDemand = "must be letters, digits, _ and -, since it names a folder";

bool is_name(const std::string& text) {
  const auto allowed = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
           c == '-';
  };
  return !text.empty() && std::all_of(text.begin(), text.end(), allowed);
}

bool has_control_character(const std::string& text) {
  return std::any_of(text.begin(), text.end(),
                     [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == '\x7f'; });
}

// A node in few words, for messages.
std::string node_text(const toml::node& node) {
  if (const auto* text = node.as_string()) return toml_string(text->get());
  if (const auto* integer = node.as_integer()) return scalar_text(integer->get());
  if (const auto* number = node.as_floating_point()) return scalar_text(number->get());
  if (const auto* boolean = node.as_boolean()) return scalar_text(boolean->get());
  return node.is_array() ? "a list" : node.is_table() ? "a table" : "a date or time";
}

// One table of the file: `path` is what stands before its keys in messages ("table.row."), `place`
// where it begins.
class TableReader {
 public:
  TableReader(const std::string& file, const toml::table& table, std::string path,
              std::string place)
      : file_(file), table_(table), path_(std::move(path)), place_(std::move(place)) {}

  void allow(const std::vector<std::string>& known) const {
    const toml::key* first = nullptr;  // TOML tables are sorted by key; the file has another order
    for (const auto& [key, node] : table_) {
      if (std::find(known.begin(), known.end(), key.str()) != known.end()) continue;
      if (first == nullptr || key.source().begin.line < first->source().begin.line) first = &key;
    }
    if (first == nullptr) return;
    const std::string near = nearest_name(std::string(first->str()), known);
    refuse(std::string(first->str()),
           "unknown key; " + (near.empty() ? fmt::format("known here: {}", fmt::join(known, ", "))
                                           : fmt::format("did you mean {}{}?", path_, near)));
  }

  // One line of text that is not empty.
  std::string text(const std::string& key) const {
    const auto* node = need(key).as_string();
    if (node == nullptr) refuse(key, "must be text, in quotes");
    if (node->get().empty()) refuse(key, "must not be empty");
    if (has_control_character(node->get()))
      refuse(key, "must be one line without control characters");
    return node->get();
  }
  std::string text_or(const std::string& key, const std::string& otherwise) const {
    return table_.contains(key) ? text(key) : otherwise;
  }
  std::string name(const std::string& key) const {
    std::string value = text(key);
    if (!is_name(value)) refuse(key, kNameDemand);
    return value;
  }

  std::vector<int64_t> seeds(const std::string& key) const {
    const toml::array* list = need(key).as_array();
    if (list == nullptr || list->empty())
      refuse(key, "must be a list of integers, as in [1, 2, 3]");
    std::vector<int64_t> values;
    for (const toml::node& node : *list) {
      const auto* integer = node.as_integer();
      if (integer == nullptr) refuse(key, node_text(node) + " in it is no integer");
      if (std::find(values.begin(), values.end(), integer->get()) != values.end()) {
        refuse(key, fmt::format("{} comes twice", integer->get()));
      }
      values.push_back(integer->get());
    }
    return values;
  }

  // Assignments; a key that the sweep gives itself would be overridden without a word.
  std::vector<std::string> sets(const std::string& key) const {
    std::vector<std::string> values;
    if (!table_.contains(key)) return values;
    const toml::array* list = need(key).as_array();
    if (list == nullptr) refuse(key, "must be a list of texts, as in [\"trainer.epochs=8\"]");
    for (const toml::node& node : *list) {
      const std::string where =
          fmt::format("{} line {}: {}{}", file_, node.source().begin.line, path_, key);
      const auto* text = node.as_string();
      if (text == nullptr) {
        throw Error(fmt::format("{}: {} in it is no text; write it as \"key=value\"", where,
                                node_text(node)));
      }
      std::string assigned;
      try {
        assigned = parse_assignment(text->get()).key;
      } catch (const Error& error) {
        throw Error(fmt::format("{}: {}", where, error.what()));
      }
      if (assigned == "seed" || assigned == "output_dir") {
        throw Error(fmt::format("{}: {}: each run gets its {} from the sweep; leave it out", where,
                                toml_string(text->get()), assigned));
      }
      values.push_back(text->get());
    }
    return values;
  }

  // The elements of [[key]], at least one.
  std::vector<TableReader> tables(const std::string& key) const {
    const std::string heading = fmt::format("[[{}{}]]", path_, key);
    if (!table_.contains(key)) {
      throw Error(fmt::format("{}: has no {}; give at least one", place_, heading));
    }
    const toml::array* list = table_.get(key)->as_array();
    if (list == nullptr || list->empty()) {
      refuse(key, fmt::format("must be a list of tables; write {}, once for each", heading));
    }
    std::vector<TableReader> found;
    for (const toml::node& node : *list) {
      const std::string place = fmt::format("{} line {}", file_, node.source().begin.line);
      if (!node.is_table()) {
        refuse(key, fmt::format("{} in it is no table; write {}", node_text(node), heading));
      }
      found.emplace_back(file_, *node.as_table(), path_ + key + ".", place);
    }
    return found;
  }

  const std::string& place() const { return place_; }

  [[noreturn]] void refuse(const std::string& key, const std::string& problem) const {
    const auto found = table_.find(key);
    throw Error(fmt::format("{} line {}: {}{} = {}: {}", file_, found->first.source().begin.line,
                            path_, key, node_text(found->second), problem));
  }

 private:
  const toml::node& need(const std::string& key) const {
    const toml::node* node = table_.get(key);
    if (node == nullptr) throw Error(fmt::format("{}: {}{} is missing", place_, path_, key));
    return *node;
  }

  const std::string& file_;
  const toml::table& table_;
  std::string path_, place_;
};

template <class List>
void refuse_twice(const TableReader& reader, const List& before, const std::string& name) {
  const auto same = [&](const auto& other) { return other.name == name; };
  if (std::any_of(before.begin(), before.end(), same)) reader.refuse("name", "comes twice");
}

SweepTable read_table(const TableReader& reader) {
  reader.allow({"name", "title", "set", "row"});
  SweepTable table;
  table.name = reader.name("name");
  table.title = reader.text_or("title", table.name);
  table.sets = reader.sets("set");
  for (const TableReader& item : reader.tables("row")) {
    item.allow({"name", "title", "set"});
    SweepRow row;
    row.name = item.name("name");
    refuse_twice(item, table.rows, row.name);
    row.title = item.text_or("title", row.name);
    row.sets = item.sets("set");
    row.place = item.place();
    table.rows.push_back(std::move(row));
  }
  return table;
}

}  // namespace

SweepConfig parse_sweep(const std::string& name, std::string_view text) {
  toml::table root;
  try {
    root = toml::parse(text, name);
  } catch (const toml::parse_error& error) {
    throw Error(fmt::format("{} line {}: not valid TOML: {}", name, error.source().begin.line,
                            error.description()));
  }
  const TableReader reader(name, root, "", name);
  reader.allow({"base", "output_dir", "seeds", "table"});
  SweepConfig sweep;
  sweep.base = reader.text("base");
  sweep.output_dir = reader.text("output_dir");
  sweep.seeds = reader.seeds("seeds");
  for (const TableReader& item : reader.tables("table")) {
    SweepTable table = read_table(item);
    refuse_twice(item, sweep.tables, table.name);
    sweep.tables.push_back(std::move(table));
  }
  return sweep;
}

std::vector<std::string> sweep_sets(const SweepTable& table, const SweepRow& row, int64_t seed) {
  std::vector<std::string> sets = table.sets;
  sets.insert(sets.end(), row.sets.begin(), row.sets.end());
  sets.push_back(fmt::format("seed={}", seed));
  return sets;
}

Config sweep_run_config(const Catalog& catalog, const SweepTable& table, const SweepRow& row,
                        int64_t seed, const std::string& base_name, std::string_view base_text) {
  try {
    return parse_config(catalog, base_name, base_text, sweep_sets(table, row, seed),
                        ConfigScope::whole);
  } catch (const Error& error) {
    throw Error(
        fmt::format("{}: table {}, row {}: {}", row.place, table.name, row.name, error.what()));
  }
}

}  // namespace leeway
