// Parsing --set.

#include <fmt/format.h>

#include <charconv>
#include <cstdlib>

#include "config/document.h"
#include "leeway/error.h"

namespace leeway {
namespace {

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
  if (equals == std::string::npos) {
    throw Error(fmt::format("--set {}: has no \"=\"; write it as key=value", assignment));
  }
  if (key.empty()) {
    throw Error(
        fmt::format("--set {}: has no key before \"=\"; write it as key=value", assignment));
  }
  const std::string text = trim(assignment.substr(equals + 1));
  std::optional<toml::table> parsed;
  try {
    parsed = parse_toml("--set", "value = " + text);
  } catch (const Error&) {
    // Not a TOML value: a number as C writes it (.2, 007), or a bare string.
  }
  if (parsed && parsed->size() == 1 && parsed->contains("value")) {
    const toml::node& node = *parsed->get("value");
    const std::optional<Scalar> scalar = scalar_of(node);
    if (!scalar) {
      throw Error(
          fmt::format("--set {}: {} is not a valid value for any key", assignment, kind_of(node)));
    }
    return {key, *scalar};
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

// The index of the environment that a --set path ("environment", "environment.3") refers to.
size_t environment_number(const std::string& path, const Given& given, Document& document) {
  const size_t count = document.environments.size();
  const std::string counted =
      count == 1   ? "there is one environment, number 0"
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
    document.environments.emplace_back("--set", given.order);
    return number;
  }
  if (!is_number || number >= count) {
    refuse(given, fmt::format("{}; environment.{}.name adds one", counted, count));
  }
  return number;
}

}  // namespace

void add_assignment(const Known& known, const std::string& assignment, ConfigScope scope,
                    uint64_t order, Document& document) {
  Assignment parsed = split_assignment(assignment);
  const std::string loss = "trainer.loss.";
  if (parsed.key.starts_with(loss) || scope == ConfigScope::loss_only) {
    const std::string path = parsed.key.starts_with(loss) ? loss : "";
    document.add({path, parsed.key.substr(path.size()), parsed.value, "--set", order});
    return;
  }
  const size_t dot = parsed.key.rfind('.');
  const std::string table = dot == std::string::npos ? "" : parsed.key.substr(0, dot);
  const std::string key = parsed.key.substr(dot == std::string::npos ? 0 : dot + 1);
  Given given{table.empty() ? "" : table + ".", key, parsed.value, "--set", order};
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
  document.add(std::move(given));
}

Setting parse_assignment(const std::string& assignment) {
  Assignment parsed = split_assignment(assignment);
  return {parsed.key, to_value(parsed.value), "--set "};
}

}  // namespace leeway
