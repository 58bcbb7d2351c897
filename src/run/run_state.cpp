#include "run/run_state.h"

#include <fmt/format.h>

#include <cmath>
#include <limits>

#include "base/json.h"
#include "leeway/error.h"

namespace leeway {
namespace {

constexpr double kLargestCount = 0x1p53;  // whole numbers up to here are doubles

const rapidjson::Value& member(const std::string& name, const rapidjson::Value& object,
                               const char* key) {
  const auto found = object.FindMember(key);
  if (found == object.MemberEnd()) throw Error(fmt::format("{}: has no \"{}\"", name, key));
  return found->value;
}

double number(const std::string& name, const rapidjson::Value& object, const char* key,
              double most) {
  const rapidjson::Value& value = member(name, object, key);
  if (!value.IsNumber()) throw Error(fmt::format("{}: \"{}\" is not a number", name, key));
  const double given = value.GetDouble();
  if (given >= 0.0 && given <= most) return given;
  throw Error(fmt::format("{}: \"{}\" = {} is not from 0 to {}", name, key, given, most));
}

double count(const std::string& name, const rapidjson::Value& object, const char* key,
             double most = kLargestCount) {
  const double given = number(name, object, key, most);
  if (given == std::floor(given)) return given;
  throw Error(fmt::format("{}: \"{}\" = {} is not an integer", name, key, given));
}

}  // namespace

std::string run_state_json(const RunState& state) {
  JsonWriter json;
  json.begin_object().key("trained_tokens").value(static_cast<double>(state.trained_tokens));
  json.key("sft_steps").value(static_cast<double>(state.sft_steps));
  json.key("sft_seconds").value(state.sft_seconds);
  json.key("initial_checksum").value(static_cast<double>(state.initial_checksum));
  json.key("course_begin").value(static_cast<double>(state.schedule_begin));
  json.key("before").begin_object();
  for (const auto& [name, value] : state.before) json.key(name).value(value);
  return json.end_object().end_object().text() + "\n";
}

RunState parse_run_state(const std::string& name, std::string_view json) {
  const rapidjson::Document root = parse_json(name, json);
  if (!root.IsObject()) throw Error(name + ": is not an object");
  RunState state;
  state.trained_tokens = static_cast<int64_t>(count(name, root, "trained_tokens"));
  state.sft_steps = static_cast<int64_t>(count(name, root, "sft_steps"));
  state.sft_seconds = number(name, root, "sft_seconds", std::numeric_limits<double>::max());
  state.initial_checksum =
      static_cast<uint32_t>(count(name, root, "initial_checksum", 4294967295.0));
  if (root.HasMember("course_begin")) {  // older checkpoints lack it
    state.schedule_begin = static_cast<int64_t>(count(name, root, "course_begin"));
  }
  const rapidjson::Value& before = member(name, root, "before");
  if (!before.IsObject()) throw Error(name + ": \"before\" is not an object");
  for (const auto& metric : before.GetObject()) {
    if (!metric.value.IsNumber() && !metric.value.IsNull()) {
      throw Error(fmt::format("{}: \"before\": \"{}\" is neither a number nor null", name,
                              metric.name.GetString()));
    }
    state.before.emplace_back(metric.name.GetString(),
                              metric.value.IsNull() ? std::nan("") : metric.value.GetDouble());
  }
  return state;
}

}  // namespace leeway
