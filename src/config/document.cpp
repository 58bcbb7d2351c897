#include "config/document.h"

#include <fmt/format.h>

#include <algorithm>

#include "config/foreign_keys.h"

namespace leeway {
namespace {

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

// Full names of tables that have `key`, either as a value or as a table.
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

class Reader {
 public:
  Reader(const Known& known, const std::string& name, ConfigScope scope, Problems& problems)
      : known_(known), name_(name), scope_(scope), problems_(problems) {}

  // Reads the tables and values of `table`, which is `section`; `path` is its path with a dot.
  void walk(const toml::table& table, const Section& section, const std::string& path) {
    // TOML tables are sorted by key; restore the order of the file.
    std::vector<std::pair<const toml::key*, const toml::node*>> items;
    for (const auto& [key, node] : table) items.emplace_back(&key, &node);
    std::sort(items.begin(), items.end(), [](const auto& a, const auto& b) {
      return order_of(a.first->source()) < order_of(b.first->source());
    });
    for (const auto& [key, node] : items) {
      problems_.attempt(order_of(key->source()), [&] { visit(*key, *node, section, path); });
    }
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
    const Field* field = section.find(key);
    const bool named_elsewhere =
        std::any_of(known_.sections.begin(), known_.sections.end(),
                    [&](const Section& other) { return other.path.ends_with("." + key); });
    if (field == nullptr && !section.open && node.is_table() && !node.as_table()->empty() &&
        !named_elsewhere && is_foreign_table(full)) {
      return foreign_table(*node.as_table(), full + ".");
    }
    if (field == nullptr && !section.open) {
      const std::string hint = problems_.full() ? "" : "; " + remedy(known_, &section, path, key);
      throw Error(fmt::format("{}: {} = {}: unknown {}{}", where, full, node_text(node),
                              path.empty() ? "table or key" : "key", hint));
    }
    const std::optional<Scalar> scalar = scalar_of(node);
    if (!scalar) problems_.blame(full);
    if ((!scalar || node.is_array()) && section.open) {
      throw Error(
          fmt::format("{}: {}: {} is not a valid value for any key", where, full, kind_of(node)));
    }
    if (!scalar) {
      throw Error(fmt::format("{}: {} = {}: {}", where, full, kind_of(node), demand(*field)));
    }
    document_.add({path, key, *scalar, where, order_of(toml_key.source())});
  }

  // Every value of a table of another code base is a problem of its own, as each has its own
  // remedy.
  void foreign_table(const toml::table& table, const std::string& path) {
    for (const auto& [key, node] : table) {
      const std::string full = path + std::string(key.str());
      if (node.is_table() && !node.as_table()->empty()) {
        foreign_table(*node.as_table(), full + ".");
        continue;
      }
      const std::string hint =
          problems_.full() ? "" : "; " + remedy(known_, nullptr, path, std::string(key.str()));
      problems_.add(order_of(key.source()),
                    fmt::format("{}: {} = {}: unknown key{}", place(key.source()), full,
                                node_text(node), hint));
    }
  }

  void environments(const toml::node& node, const std::string& where) {
    const toml::array* list = node.as_array();
    if (list == nullptr) {
      throw Error(
          fmt::format("{}: environment = {}: must be a list of tables; write [[environment]] for "
                      "each",
                      where, node_text(node)));
    }
    for (const toml::node& element : *list) {
      const size_t number = document_.environments.size();
      document_.environments.emplace_back(place(element.source()), order_of(element.source()));
      if (!element.is_table()) {
        problems_.add(order_of(element.source()),
                      fmt::format("{}: environment.{} = {}: must be a table, [[environment]]",
                                  place(element.source()), number, node_text(element)));
        problems_.blame(fmt::format("environment.{}.name", number));
        continue;
      }
      walk(*element.as_table(), known_.environment, fmt::format("environment.{}.", number));
    }
  }

  const Known& known_;
  const std::string& name_;
  ConfigScope scope_;
  Problems& problems_;
  Document document_;
};

}  // namespace

const char* kind_of(const toml::node& node) {
  return node.is_array() ? "a list" : node.is_table() ? "a table" : "a date or time";
}

std::optional<Scalar> scalar_of(const toml::node& node) {
  if (const auto* boolean = node.as_boolean()) return boolean->get();
  if (const auto* integer = node.as_integer()) return integer->get();
  if (const auto* number = node.as_floating_point()) return number->get();
  if (const auto* text = node.as_string()) return text->get();
  if (const auto* list = node.as_array()) {
    std::vector<std::string> texts;
    for (const toml::node& element : *list) {
      if (!element.is_string()) return std::nullopt;
      texts.push_back(element.as_string()->get());
    }
    return texts;
  }
  return std::nullopt;
}

std::string node_text(const toml::node& node) {
  const std::optional<Scalar> scalar = scalar_of(node);
  return scalar ? scalar_text(*scalar) : kind_of(node);
}

std::string remedy(const Known& known, const Section* section, const std::string& path,
                   const std::string& key) {
  const std::string foreign = foreign_hint(path + key);
  if (is_foreign_path(path + key)) return foreign;
  const std::vector<std::string> exact = elsewhere(known, key);
  if (!exact.empty()) return fmt::format("did you mean {}?", fmt::join(exact, " or "));
  if (!foreign.empty()) return foreign;
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

uint64_t order_of(const toml::source_region& region) {
  return (uint64_t{region.begin.line} << 24) + std::min<uint64_t>(region.begin.column, 0xFFFFFF);
}

Document read_document(const Known& known, const std::string& name, const toml::table& root,
                       ConfigScope scope, Problems& problems) {
  Reader reader(known, name, scope, problems);
  reader.walk(root, *known.find(""), "");
  return reader.take();
}

}  // namespace leeway
