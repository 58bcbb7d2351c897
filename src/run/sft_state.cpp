#include "run/sft_state.h"

#include <fmt/format.h>

#include <cmath>

#include "base/json.h"
#include "leeway/error.h"

namespace leeway {

std::string sft_state_json(const SftState& state) {
  JsonWriter json;
  json.begin_object().key("steps").value(static_cast<double>(state.steps));
  json.key("tokens").value(static_cast<double>(state.tokens));
  json.key("seconds").value(state.seconds).key("loss").value(state.loss);
  json.key("reward").value(state.reward).key("reached_reward").value(state.reached_reward);
  return json.end_object().text() + "\n";
}

SftState parse_sft_state(const std::string& name, std::string_view text) {
  const rapidjson::Document json = parse_json(name, text);
  const auto refuse = [&](const char* key) {
    throw Error(fmt::format("{}: \"{}\" is missing or invalid", name, key));
  };
  const auto number = [&](const char* key) {
    if (!json.IsObject() || !json.HasMember(key) || !json[key].IsNumber()) refuse(key);
    return json[key].GetDouble();
  };
  const auto count = [&](const char* key) {
    const double value = number(key);
    if (!(value >= 0.0 && value <= 0x1p53) || value != std::floor(value)) refuse(key);
    return static_cast<int64_t>(value);
  };
  SftState state;
  state.steps = count("steps");
  state.tokens = count("tokens");
  state.seconds = number("seconds");
  if (!(state.seconds >= 0.0)) refuse("seconds");
  state.loss = number("loss");
  if (json.HasMember("reward") && json["reward"].IsNumber())
    state.reward = json["reward"].GetDouble();
  if (!json.HasMember("reached_reward") || !json["reached_reward"].IsBool()) {
    refuse("reached_reward");
  }
  state.reached_reward = json["reached_reward"].GetBool();
  return state;
}

}  // namespace leeway
