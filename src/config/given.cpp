#include "config/given.h"

#include <fmt/format.h>
#include <toml++/toml.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>

#include "base/json.h"
#include "leeway/error.h"

namespace leeway {
namespace {

// Names what a node is if it is none of the four kinds of value.
const char* kind_of(const toml::node& node) {
  return node.is_array() ? "a list" : node.is_table() ? "a table" : "a date or time";
}

std::optional<Scalar> scalar_of(const toml::node& node) {
  if (const auto* boolean = node.as_boolean()) return boolean->get();
  if (const auto* integer = node.as_integer()) return integer->get();
  if (const auto* number = node.as_floating_point()) return number->get();
  if (const auto* text = node.as_string()) return text->get();
  return std::nullopt;
}

// A node in few words, for messages.
std::string node_text(const toml::node& node) {
  const std::optional<Scalar> scalar = scalar_of(node);
  return scalar ? scalar_text(*scalar) : kind_of(node);
}

std::vector<std::string> names_in(const Known& known, const Section& section) {
  std::vector<std::string> names;
  for (const Field& field : section.fields) names.push_back(field.key);
  const std::string prefix = section.prefix();
  for (const Section& other : known.sections) {
    if (other.path.size() <= prefix.size() || !other.path.starts_with(prefix)) continue;
    const std::string rest = other.path.substr(prefix.size());
    if (rest.find('.') == std::string::npos) names.push_back(rest);
  }
  if (section.path.empty()) names.emplace_back("environment");
  return names;
}

// Full names under which some table has `key`, be it a value or a table.
std::vector<std::string> elsewhere(const Known& known, const std::string& key) {
  std::vector<std::string> names;
  for (const Section& section : known.sections) {
    if (section.find(key) != nullptr) names.push_back(section.prefix() + key);
    if (section.path.ends_with("." + key)) names.push_back(section.path);
  }
  if (known.environment.find(key) != nullptr) names.push_back("environment." + key);
  const auto& loss = known.loss_keys;
  if (std::find(loss.begin(), loss.end(), key) != loss.end())
    names.push_back("trainer.loss." + key);
  return names;
}

std::vector<std::string> all_keys(const Known& known) {
  std::vector<std::string> keys = known.loss_keys;
  for (const Section& section : known.sections) {
    for (const Field& field : section.fields) keys.push_back(field.key);
  }
  for (const Field& field : known.environment.fields) keys.push_back(field.key);
  return keys;
}

// What to write instead of an unknown key of `section`, which stands under `path`; nullptr: of no
// table that is known.
std::string remedy(const Known& known, const Section* section, const std::string& path,
                   const std::string& key) {
  const std::vector<std::string> exact = elsewhere(known, key);
  if (!exact.empty()) return fmt::format("did you mean {}?", fmt::join(exact, " or "));
  std::vector<std::string> here;
  if (section != nullptr) {
    here = names_in(known, *section);
    const std::string near = nearest_name(key, here);
    if (!near.empty()) return fmt::format("did you mean {}{}?", path, near);
  }
  const std::string near = nearest_name(key, all_keys(known));
  if (!near.empty()) {
    return fmt::format("did you mean {}?", fmt::join(elsewhere(known, near), " or "));
  }
  if (section != nullptr) return fmt::format("known here: {}", fmt::join(here, ", "));
  return "leeway config --reference lists every key";
}

class Reader {
 public:
  Reader(const Known& known, const std::string& name, ConfigScope scope)
      : known_(known), name_(name), scope_(scope) {}

  // The tables and values of `table`, which is `section` under `path` (with a dot).
  void walk(const toml::table& table, const Section& section, const std::string& path) {
    // TOML tables are sorted by key; problems are reported in the order of the file.
    std::vector<std::pair<const toml::key*, const toml::node*>> items;
    for (const auto& [key, node] : table) items.emplace_back(&key, &node);
    std::sort(items.begin(), items.end(), [](const auto& a, const auto& b) {
      const auto& left = a.first->source().begin;
      const auto& right = b.first->source().begin;
      return left.line != right.line ? left.line < right.line : left.column < right.column;
    });
    for (const auto& [key, node] : items) visit(*key, *node, section, path);
  }

  Document take() { return std::move(document_); }

 private:
  std::string place(const toml::source_region& region) const {
    return fmt::format("{} line {}", name_, region.begin.line);
  }

  void visit(const toml::key& toml_key, const toml::node& node, const Section& section,
             const std::string& path) {
    const std::string key(toml_key.str()), full = path + key;
    const std::string where = place(toml_key.source());
    if (scope_ == ConfigScope::loss_only && full != "trainer" && full != "trainer.loss" &&
        path != "trainer.loss.") {
      return;
    }
    const Section* inner = known_.find(full);
    if (inner != nullptr && !full.empty()) {
      if (!node.is_table()) {
        throw Error(
            fmt::format("{}: {} = {}: must be a table, [{}]", where, full, node_text(node), full));
      }
      document_.tables.push_back(full);
      return walk(*node.as_table(), *inner, full + ".");
    }
    if (full == "environment") return environments(node, where);
    if (section.open) {
      const std::optional<Scalar> scalar = scalar_of(node);
      if (!scalar) {
        throw Error(fmt::format("{}: {}: {} is not a value any key here takes", where, full,
                                kind_of(node)));
      }
      document_.values.push_back({path, key, *scalar, where});
      return;
    }
    const Field* field = section.find(key);
    if (field == nullptr) {
      throw Error(fmt::format("{}: {} = {}: unknown {}; {}", where, full, node_text(node),
                              path.empty() ? "table or key" : "key",
                              remedy(known_, &section, path, key)));
    }
    const std::optional<Scalar> scalar = scalar_of(node);
    if (!scalar) {
      throw Error(fmt::format("{}: {} = {}: {}", where, full, kind_of(node), demand(*field)));
    }
    document_.values.push_back({path, key, *scalar, where});
  }

  void environments(const toml::node& node, const std::string& where) {
    const toml::array* list = node.as_array();
    if (list == nullptr) {
      throw Error(
          fmt::format("{}: environment = {}: must be a list of tables; write "
                      "[[environment]], once for each",
                      where, node_text(node)));
    }
    for (const toml::node& element : *list) {
      const size_t number = document_.environments.size();
      if (!element.is_table()) {
        throw Error(fmt::format("{}: environment.{} = {}: must be a table, [[environment]]",
                                place(element.source()), number, node_text(element)));
      }
      document_.environments.push_back(place(element.source()));
      walk(*element.as_table(), known_.environment, fmt::format("environment.{}.", number));
    }
  }

  const Known& known_;
  const std::string& name_;
  ConfigScope scope_;
  Document document_;
};

struct Assignment {
  std::string key;
  Scalar value;
};

Assignment split_assignment(const std::string& assignment) {
  auto trim = [](std::string text) {
    while (!text.empty() && text.back() == ' ') text.pop_back();
    while (!text.empty() && text.front() == ' ') text.erase(text.begin());
    return text;
  };
  const size_t equals = assignment.find('=');
  const std::string key = trim(assignment.substr(0, equals));
  if (key.empty() || equals == std::string::npos) {
    throw Error(fmt::format("--set {}: write it as key=value", assignment));
  }
  const std::string text = trim(assignment.substr(equals + 1));
  try {
    const toml::table parsed = toml::parse("value = " + text);
    if (parsed.size() == 1 && parsed.contains("value")) {
      const toml::node& node = *parsed.get("value");
      const std::optional<Scalar> scalar = scalar_of(node);
      if (!scalar) {
        throw Error(fmt::format("--set {}: {} is not a value any key here takes", assignment,
                                kind_of(node)));
      }
      return {key, *scalar};
    }
  } catch (const toml::parse_error&) {
    // Not a TOML value: a number as C writes it (.2, 007), or a bare string.
  }
  const char* end = text.c_str() + text.size();
  int64_t integer = 0;
  const auto [stop, problem] = std::from_chars(text.c_str(), end, integer);
  if (!text.empty() && problem == std::errc() && stop == end) return {key, integer};
  char* number_end = nullptr;
  const double number = std::strtod(text.c_str(), &number_end);
  if (!text.empty() && number_end == end) return {key, number};
  return {key, text};
}

// The number of the environment that a --set path ("environment", "environment.3") speaks of.
size_t environment_number(const std::string& path, const Given& given, Document& document) {
  const size_t count = document.environments.size();
  const std::string counted =
      count == 1   ? "there is 1 environment, number 0"
      : count == 0 ? "there is no [[environment]]"
                   : fmt::format("there are {} environments, numbers 0 to {}", count, count - 1);
  if (path == "environment") {
    if (count == 1) return 0;
    refuse(given, fmt::format("{}; write the number, as in environment.0.{}", counted, given.key));
  }
  const std::string digits = path.substr(std::string("environment.").size());
  const char* end = digits.c_str() + digits.size();
  size_t number = 0;
  const auto [stop, problem] = std::from_chars(digits.c_str(), end, number);
  const bool is_number = problem == std::errc() && stop == end;
  if (is_number && number == count && given.key == "name") {
    document.environments.emplace_back("--set");
    return number;
  }
  if (!is_number || number >= count) {
    refuse(given, fmt::format("{}; environment.{}.name adds one", counted, count));
  }
  return number;
}

}  // namespace

void refuse(const Given& given, const std::string& problem) {
  throw Error(
      fmt::format("{}{} = {}: {}", given.where(), given.key, scalar_text(given.value), problem));
}

const Section* Known::find(const std::string& path) const {
  for (const Section& section : sections) {
    if (section.path == path) return &section;
  }
  return nullptr;
}

bool Document::has_table(const std::string& path) const {
  return std::find(tables.begin(), tables.end(), path) != tables.end();
}

const Given* Document::find(const std::string& name) const {
  const auto found = std::find_if(values.rbegin(), values.rend(),
                                  [&](const Given& given) { return given.name() == name; });
  return found == values.rend() ? nullptr : &*found;
}

Document read_document(const Known& known, const std::string& name, std::string_view text,
                       ConfigScope scope) {
  toml::table root;
  try {
    root = toml::parse(text, name);
  } catch (const toml::parse_error& error) {
    throw Error(fmt::format("{} line {}: not valid TOML: {}", name, error.source().begin.line,
                            error.description()));
  }
  Reader reader(known, name, scope);
  reader.walk(root, *known.find(""), "");
  return reader.take();
}

void add_assignment(const Known& known, const std::string& assignment, ConfigScope scope,
                    Document& document) {
  Assignment parsed = split_assignment(assignment);
  const std::string loss = "trainer.loss.";
  if (parsed.key.starts_with(loss) || scope == ConfigScope::loss_only) {
    const std::string path = parsed.key.starts_with(loss) ? loss : "";
    document.values.push_back({path, parsed.key.substr(path.size()), parsed.value, "--set"});
    return;
  }
  const size_t dot = parsed.key.rfind('.');
  const std::string table = dot == std::string::npos ? "" : parsed.key.substr(0, dot);
  const std::string key = parsed.key.substr(dot == std::string::npos ? 0 : dot + 1);
  Given given{table.empty() ? "" : table + ".", key, parsed.value, "--set"};
  if (known.find(parsed.key) != nullptr || parsed.key == "environment") {
    refuse(given, "is a table; set one of its keys, as in " + parsed.key + ".KEY=VALUE");
  }
  const bool environment = table == "environment" || table.starts_with("environment.");
  const Section* section = environment ? &known.environment : known.find(table);
  if (section == nullptr || section->find(key) == nullptr) {
    refuse(given, "unknown key; " + remedy(known, section, given.path, key));
  }
  if (environment) {
    given.path = fmt::format("environment.{}.", environment_number(table, given, document));
  } else {
    document.tables.push_back(table);
  }
  document.values.push_back(std::move(given));
}

Setting parse_assignment(const std::string& assignment) {
  Assignment parsed = split_assignment(assignment);
  return {parsed.key, to_value(parsed.value), "--set "};
}

Value to_value(const Scalar& scalar) {
  if (const auto* flag = std::get_if<bool>(&scalar)) return *flag;
  if (const auto* integer = std::get_if<int64_t>(&scalar)) return static_cast<double>(*integer);
  if (const auto* number = std::get_if<double>(&scalar)) return *number;
  return std::get<std::string>(scalar);
}

std::string toml_string(const std::string& text) {
  JsonWriter quoted;  // TOML's basic strings escape as JSON's do, but for one character
  quoted.value(text);
  std::string out;
  for (const char c : quoted.text()) {
    if (c == '\x7f') {
      out += "\\u007F";
    } else {
      out += c;
    }
  }
  return out;
}

std::string scalar_text(const Scalar& scalar) {
  if (const auto* integer = std::get_if<int64_t>(&scalar)) return fmt::format("{}", *integer);
  if (const auto* text = std::get_if<std::string>(&scalar)) return toml_string(*text);
  const std::string plain = value_text(to_value(scalar));
  return plain == "infinity" ? "inf" : plain == "-infinity" ? "-inf" : plain;
}

}  // namespace leeway
