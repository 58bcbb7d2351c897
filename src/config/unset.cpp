// Removing from a file what --unset names.

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <optional>
#include <set>

#include "config/document.h"
#include "leeway/error.h"

namespace leeway {
namespace {

constexpr size_t kMostNames = 1000;

// Full names of tables and keys, as --unset accepts them.
void collect_names(const toml::node& node, const std::string& name,
                   std::vector<std::string>& names) {
  if (names.size() >= kMostNames) return;
  if (!name.empty()) names.push_back(name);
  const std::string prefix = name.empty() ? "" : name + ".";
  if (const toml::table* table = node.as_table()) {
    for (const auto& [key, inner] : *table) {
      collect_names(inner, prefix + std::string(key.str()), names);
    }
  } else if (const toml::array* list = node.as_array()) {
    for (size_t i = 0; i < list->size(); ++i) {
      collect_names(*list->get(i), prefix + std::to_string(i), names);
    }
  }
}

std::vector<std::string> parts_of(const std::string& name) {
  std::vector<std::string> parts(1);
  for (const char c : name) {
    if (c == '.') {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

std::optional<size_t> index_of(const std::string& text, size_t count) {
  size_t number = 0;
  const char* end = text.data() + text.size();
  const auto [stop, problem] = std::from_chars(text.data(), end, number);
  if (problem != std::errc() || stop != end || number >= count) return std::nullopt;
  return number;
}

// Removes one key or table. List elements are only recorded in `elements`, so that the numbers of
// the others stay valid. Returns false if it does not exist.
bool remove_one(toml::table& root, const std::string& name, std::set<size_t>& elements) {
  const std::vector<std::string> parts = parts_of(name);
  toml::table* table = &root;
  for (size_t i = 0; i < parts.size(); ++i) {
    toml::node* node = table->get(parts[i]);
    if (node == nullptr) return false;
    const bool last = i + 1 == parts.size();
    toml::array* list = node->as_array();
    if (last) {
      table->erase(parts[i]);
      return true;
    }
    if (list != nullptr && parts[i] == "environment" && i == 0) {
      const std::optional<size_t> number = index_of(parts[1], list->size());
      if (!number && list->size() != 1) return false;
      if (number && parts.size() == 2) {
        elements.insert(*number);
        return true;
      }
      if (number) ++i;
      node = list->get(number.value_or(0));
    }
    table = node->as_table();
    if (table == nullptr) return false;
  }
  return false;
}

}  // namespace

void remove_unset(toml::table& root, const std::string& file, std::vector<std::string> unsets,
                  ConfigScope scope, Problems& problems) {
  std::set<size_t> elements;
  uint64_t order = kOrderOfUnset;
  for (const std::string& asked : unsets) {
    const bool bare = scope == ConfigScope::loss_only && asked.find('.') == std::string::npos &&
                      asked != "trainer";
    const std::string name = bare ? "trainer.loss." + asked : asked;
    ++order;
    if (remove_one(root, name, elements)) continue;
    std::vector<std::string> names;
    collect_names(root, "", names);
    std::string near = nearest_name(name, names);
    if (near.empty()) {
      std::vector<std::string> top;
      for (const std::string& other : names) {
        if (other.find('.') == std::string::npos) top.push_back(other);
      }
      near = top.empty() ? "it is empty" : fmt::format("it has {}", fmt::join(top, ", "));
    } else {
      near = fmt::format("did you mean {}?", near);
    }
    problems.add(order,
                 fmt::format("--unset {}: {} has no such key or table; {}", name, file, near));
  }
  toml::array* list = root["environment"].as_array();
  if (list == nullptr) return;
  for (auto number = elements.rbegin(); number != elements.rend(); ++number) {
    list->erase(list->begin() + static_cast<ptrdiff_t>(*number));
  }
}

}  // namespace leeway
