#include "config/sweep_config.h"

#include <fmt/format.h>

#include <algorithm>

#include "config/document.h"
#include "leeway/error.h"

namespace leeway {
namespace {

constexpr int64_t kMostSeed = (int64_t{1} << 53) - 1;  // the same as a run's
constexpr const char* kNameDemand =
    "must consist of letters, digits, _ and -, since it names a folder";

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

// A problem's text and its sort key.
struct Refusal {
  uint64_t order;
  std::string text;
};

// Runs `step`; a Refusal that it throws becomes a problem.
template <class Step>
void attempt(Problems& problems, Step&& step) {
  try {
    step();
  } catch (const Refusal& refusal) {
    problems.add(refusal.order, refusal.text);
  }
}

// One table of the file: `path` is the prefix of its keys in messages ("table.row."), `place` where
// it starts. Reading a key throws a Refusal if there is a problem; where there may be several, they
// are added to `problems`.
class TableReader {
 public:
  TableReader(const std::string& file, const toml::table& table, std::string path,
              std::string place, uint64_t order, Problems& problems)
      : file_(file),
        table_(table),
        path_(std::move(path)),
        place_(std::move(place)),
        order_(order),
        problems_(problems) {}

  void allow(const std::vector<std::string>& known) const {
    for (const auto& [key, node] : table_) {
      const std::string name(key.str());
      if (std::find(known.begin(), known.end(), name) != known.end()) continue;
      const std::string near = problems_.full() ? "" : nearest_name(name, known);
      attempt(problems_, [&] {
        refuse(name, "unknown key; " + (near.empty()
                                            ? fmt::format("known here: {}", fmt::join(known, ", "))
                                            : fmt::format("did you mean {}{}?", path_, near)));
      });
    }
  }

  // A nonempty line of text.
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
      if (integer == nullptr) refuse(key, node_text(node) + " in the list is not an integer");
      if (integer->get() < 0 || integer->get() > kMostSeed) {
        refuse(key, fmt::format("{} in the list must be 0 to {}", integer->get(), kMostSeed));
      }
      if (std::find(values.begin(), values.end(), integer->get()) != values.end()) {
        refuse(key, fmt::format("{} occurs twice", integer->get()));
      }
      values.push_back(integer->get());
    }
    return values;
  }

  bool flag_or(const std::string& key, bool otherwise) const {
    if (!table_.contains(key)) return otherwise;
    const auto* node = need(key).as_boolean();
    if (node == nullptr) refuse(key, "must be true or false");
    return node->get();
  }

  // Assignments. A key that the sweep itself sets is refused, since it would be silently
  // overridden.
  std::vector<std::string> sets(const std::string& key) const {
    std::vector<std::string> values;
    if (!table_.contains(key)) return values;
    const toml::array* list = need(key).as_array();
    if (list == nullptr) refuse(key, "must be a list of strings, as in [\"trainer.epochs=8\"]");
    for (const toml::node& node : *list) {
      attempt(problems_, [&] { values.push_back(assignment(key, node)); });
    }
    return values;
  }

  // The elements of [[key]], at least one.
  std::vector<TableReader> tables(const std::string& key) const {
    const std::string heading = fmt::format("[[{}{}]]", path_, key);
    if (!table_.contains(key)) {
      throw Refusal{order_, fmt::format("{}: has no {}; give at least one", place_, heading)};
    }
    const toml::array* list = table_.get(key)->as_array();
    if (list == nullptr || list->empty()) {
      refuse(key, fmt::format("must be a list of tables; write {} for each", heading));
    }
    std::vector<TableReader> found;
    for (const toml::node& node : *list) {
      const std::string place = fmt::format("{} line {}", file_, node.source().begin.line);
      if (!node.is_table()) {
        refuse(key,
               fmt::format("{} in the list is not a table; write {}", node_text(node), heading));
      }
      found.emplace_back(file_, *node.as_table(), path_ + key + ".", place, order_of(node.source()),
                         problems_);
    }
    return found;
  }

  const std::string& place() const { return place_; }

  [[noreturn]] void refuse(const std::string& key, const std::string& problem) const {
    const auto found = table_.find(key);
    throw Refusal{order_of(found->first.source()),
                  fmt::format("{} line {}: {}{} = {}: {}", file_, found->first.source().begin.line,
                              path_, key, node_text(found->second), problem)};
  }

 private:
  std::string assignment(const std::string& key, const toml::node& node) const {
    const uint64_t order = order_of(node.source());
    const std::string where =
        fmt::format("{} line {}: {}{}", file_, node.source().begin.line, path_, key);
    const auto* text = node.as_string();
    if (text == nullptr) {
      throw Refusal{order, fmt::format("{}: {} in the list is not a string; write it as "
                                       "\"key=value\"",
                                       where, node_text(node))};
    }
    std::string assigned;
    try {
      assigned = parse_assignment(text->get()).key;
    } catch (const Error& error) {
      throw Refusal{order, fmt::format("{}: {}", where, error.what())};
    }
    if (assigned == "seed" || assigned == "output_dir") {
      throw Refusal{order, fmt::format("{}: {}: the sweep sets the {} of each run; leave it out",
                                       where, toml_string(text->get()), assigned)};
    }
    return text->get();
  }

  const toml::node& need(const std::string& key) const {
    const toml::node* node = table_.get(key);
    if (node == nullptr) {
      throw Refusal{order_, fmt::format("{}: {}{} is missing", place_, path_, key)};
    }
    return *node;
  }

  const std::string& file_;
  const toml::table& table_;
  std::string path_, place_;
  uint64_t order_;
  Problems& problems_;
};

template <class List>
void refuse_twice(const TableReader& reader, const List& before, const std::string& name) {
  const auto same = [&](const auto& other) { return other.name == name; };
  if (std::any_of(before.begin(), before.end(), same)) reader.refuse("name", "occurs twice");
}

SweepTable read_table(const TableReader& reader, Problems& problems) {
  reader.allow({"name", "title", "set", "row"});
  SweepTable table;
  attempt(problems, [&] { table.name = reader.name("name"); });
  attempt(problems, [&] { table.title = reader.text_or("title", table.name); });
  attempt(problems, [&] { table.sets = reader.sets("set"); });
  std::vector<TableReader> rows;
  attempt(problems, [&] { rows = reader.tables("row"); });
  for (const TableReader& item : rows) {
    item.allow({"name", "title", "set"});
    SweepRow row;
    attempt(problems, [&] {
      row.name = item.name("name");
      refuse_twice(item, table.rows, row.name);
    });
    attempt(problems, [&] { row.title = item.text_or("title", row.name); });
    attempt(problems, [&] { row.sets = item.sets("set"); });
    row.place = item.place();
    table.rows.push_back(std::move(row));
  }
  return table;
}

}  // namespace

SweepConfig parse_sweep(const std::string& name, std::string_view text) {
  const toml::table root = parse_toml(name, text);
  Problems problems;
  const TableReader reader(name, root, "", name, 0, problems);
  reader.allow({"base", "output_dir", "seeds", "keep_weights", "table"});
  SweepConfig sweep;
  attempt(problems, [&] { sweep.base = reader.text("base"); });
  attempt(problems, [&] { sweep.output_dir = reader.text("output_dir"); });
  attempt(problems, [&] { sweep.seeds = reader.seeds("seeds"); });
  attempt(problems, [&] { sweep.keep_weights = reader.flag_or("keep_weights", true); });
  std::vector<TableReader> tables;
  attempt(problems, [&] { tables = reader.tables("table"); });
  for (const TableReader& item : tables) {
    SweepTable table = read_table(item, problems);
    if (!table.name.empty()) {
      attempt(problems, [&] { refuse_twice(item, sweep.tables, table.name); });
    }
    sweep.tables.push_back(std::move(table));
  }
  problems.throw_if_any();
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
  } catch (const ConfigError& error) {
    // Problems of the base file do not belong to a row.
    std::vector<std::string> problems = error.problems;
    for (std::string& problem : problems) {
      if (problem.starts_with(base_name + " line ")) continue;
      problem = fmt::format("{}: table {}, row {}: {}", row.place, table.name, row.name, problem);
    }
    throw ConfigError(std::move(problems), error.total);
  }
}

void SweepProblems::add(const ConfigError& error) {
  for (const std::string& problem : error.problems) {
    const auto same = std::find(problems_.begin(), problems_.end(), problem);
    if (same == problems_.end()) problems_.push_back(problem);
  }
}

void SweepProblems::throw_if_any() const {
  Problems all;
  for (size_t i = 0; i < problems_.size(); ++i) all.add(i, problems_[i]);
  all.throw_if_any();
}

}  // namespace leeway
