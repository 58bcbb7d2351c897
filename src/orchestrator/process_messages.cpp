#include "orchestrator/process_messages.h"

#include <fmt/format.h>

#include <cmath>
#include <cstdlib>
#include <utility>

#include "base/utf8.h"
#include "leeway/error.h"
#include "text/byte_level.h"

namespace leeway {
namespace {

using Kind = JsonValue::Kind;

// `arguments` for calls that could be parsed, `raw` for those that could not.
std::string tool_calls_json(const std::vector<ParsedToolCall>& calls) {
  std::string out = "[";
  for (const ParsedToolCall& parsed : calls) {
    if (out.size() > 1) out += ", ";
    out += fmt::format("{{\"status\": \"{}\", \"name\": {}", name_of(parsed.status),
                       to_json(parsed.call.name));
    if (!parsed.call.id.empty()) out += fmt::format(", \"id\": {}", to_json(parsed.call.id));
    if (parsed.status == ToolCallStatus::ok && !parsed.call.arguments.empty()) {
      out += ", \"arguments\": " + parsed.call.arguments;
    }
    out += fmt::format(", \"raw\": {}}}", to_json(parsed.raw));
  }
  return out + "]";
}

bool is_plain(const std::string& name) {
  return !name.empty() && name.find_first_not_of(
                              "abcdefghijklmnopqrstuvwxyz"
                              "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
                              "0123456789_-.") == std::string::npos;
}

// Parts are metrics, in addition to those that every environment has.
void check_part_name(const std::string& name) {
  if (is_plain(name) && name != "mean" && name != "min" && name != "max") return;
  throw Error(fmt::format(
      "rewards has a part {}: a part's name must consist of letters, digits, '_', '-' and '.', "
      "and not be mean, min or max: it is part of metric names",
      to_json(name)));
}

}  // namespace

std::string one_line(std::string_view json) {
  std::string out;
  while (!json.empty()) {
    const Utf8Unit unit = next_utf8(json);
    if (unit.kind != Utf8Kind::valid) {
      append_utf8(out, 0xFFFD);
    } else if (json.front() == '\n' || json.front() == '\r') {
      out += ' ';
    } else {
      out += json.substr(0, unit.length);
    }
    json.remove_prefix(unit.length);
  }
  return out;
}

std::string reply_json(const Reply& reply) {
  return fmt::format("{{\"text\": {}, \"content\": {}, \"truncated\": {}, \"tool_calls\": {}}}",
                     to_json(reply.text), to_json(reply.response.content), reply.truncated,
                     tool_calls_json(reply.response.tool_calls));
}

std::string reported_error(const std::string& text) {
  constexpr size_t kMostBytes = 1000;
  if (text.size() <= kMostBytes) return "the program reports: " + text;
  const std::string_view begin = std::string_view(text).substr(0, kMostBytes);
  return fmt::format("the program reports: {} ..", begin.substr(0, valid_utf8_prefix(begin)));
}

double finite_number(const JsonValue& value, const std::string& name) {
  if (!value.is(Kind::number)) {
    throw Error(fmt::format("{} must be a number, not {}", name, name_of(value.kind)));
  }
  const double number = std::strtod(value.text.c_str(), nullptr);
  if (!std::isfinite(number)) {
    throw Error(fmt::format("{} is {}: it must be finite", name, value.text));
  }
  return number;
}

double reward_number(const JsonValue& value, const std::string& name) {
  if (value.is(Kind::boolean)) return value.truth ? 1.0 : 0.0;
  return finite_number(value, name);
}

std::vector<RewardPart> read_rewards(const JsonValue& rewards) {
  if (!rewards.is(Kind::object) || rewards.members.empty()) {
    throw Error("rewards must be an object with a number, or a value and a weight, for each part");
  }
  std::vector<RewardPart> parts;
  for (const auto& [name, value] : rewards.members) {
    check_part_name(name);
    RewardPart part{.name = name};
    if (value.is(Kind::object)) {
      const JsonValue* inside = value.find("value");
      if (inside == nullptr) throw Error(fmt::format("rewards.{} has no value", name));
      part.value = reward_number(*inside, fmt::format("rewards.{}.value", name));
      if (const JsonValue* weight = value.find("weight")) {
        part.weight = finite_number(*weight, fmt::format("rewards.{}.weight", name));
      }
    } else {
      part.value = reward_number(value, "rewards." + name);
    }
    parts.push_back(std::move(part));
  }
  return parts;
}

NamedNumbers read_numbers(const JsonValue& value, const std::string& what) {
  if (!value.is(Kind::object)) {
    throw Error(fmt::format("{} must be an object of numbers, not {}", what, name_of(value.kind)));
  }
  NamedNumbers numbers;
  for (const auto& [name, number] : value.members) {
    if (!is_plain(name)) {
      throw Error(
          fmt::format("{} has the name {}: it must consist of letters, digits, '_', '-' "
                      "and '.': it is part of metric names",
                      what, to_json(name)));
    }
    numbers.emplace_back(name, finite_number(number, what + "." + name));
  }
  return numbers;
}

}  // namespace leeway
