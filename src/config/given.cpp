#include "config/given.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/json.h"
#include "leeway/error.h"

namespace leeway {

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

void Document::add(Given given) {
  last_[given.name()] = values_.size();
  values_.push_back(std::move(given));
}

void Document::remove(const std::set<std::string>& names) {
  std::erase_if(values_, [&](const Given& given) { return names.contains(given.name()); });
  last_.clear();
  for (size_t i = 0; i < values_.size(); ++i) last_[values_[i].name()] = i;
}

bool Document::has_table(const std::string& path) const {
  return std::find(tables.begin(), tables.end(), path) != tables.end();
}

const Given* Document::find(const std::string& name) const {
  const auto found = last_.find(name);
  return found == last_.end() ? nullptr : &values_[found->second];
}

std::string Document::command_line(const std::string& name) const {
  const bool table = name.ends_with('.');
  for (const Given& given : values_) {
    if (given.in_file() || (table ? given.path != name : find(name) != &given)) continue;
    return fmt::format("--set {} = {}", given.name(), scalar_text(given.value));
  }
  for (const std::string& other : unset) {
    const bool inside = table && other.starts_with(name);
    if (inside || other == name || name.starts_with(other + ".")) return "--unset " + other;
  }
  return "";
}

Value to_value(const Scalar& scalar) {
  if (const auto* flag = std::get_if<bool>(&scalar)) return *flag;
  if (const auto* integer = std::get_if<int64_t>(&scalar)) return static_cast<double>(*integer);
  if (const auto* number = std::get_if<double>(&scalar)) return *number;
  if (const auto* list = std::get_if<std::vector<std::string>>(&scalar)) return scalar_text(*list);
  return std::get<std::string>(scalar);
}

std::string toml_string(const std::string& text) {
  JsonWriter quoted;  // TOML's basic strings escape like JSON's, with one exception
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
  if (const auto* list = std::get_if<std::vector<std::string>>(&scalar)) {
    std::string out;
    for (const std::string& text : *list) out += (out.empty() ? "" : ", ") + toml_string(text);
    return "[" + out + "]";
  }
  const std::string plain = value_text(to_value(scalar));
  return plain == "infinity" ? "inf" : plain == "-infinity" ? "-inf" : plain;
}

}  // namespace leeway
