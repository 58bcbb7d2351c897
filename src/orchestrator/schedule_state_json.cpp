#include "orchestrator/schedule_state_json.h"

#include <fmt/format.h>

#include <cmath>
#include <limits>
#include <type_traits>

#include "base/json.h"
#include "leeway/error.h"

namespace leeway {
namespace {

using Json = rapidjson::Value;

// Every counter under its name, once for writing and reading.
template <class State, class Each>
void for_each_number(State& state, Each&& each) {
  each("version", state.version);
  each("batches_taken", state.batches_taken);
  each("next_group", state.next_group);
  each("next_rollout", state.next_rollout);
  auto& t = state.totals;
  each("admitted", t.admitted);
  each("completed", t.completed);
  each("failed", t.failed);
  each("cancelled", t.cancelled);
  each("batched", t.batched);
  each("filtered", t.filtered);
  each("stale", t.stale);
  each("dropped", t.dropped);
  each("groups_opened", t.groups_opened);
  each("groups_dropped", t.groups_dropped);
  each("groups_stale", t.groups_stale);
  each("groups_batched", t.groups_batched);
  each("groups_partial", t.groups_partial);
  each("quarantined_prompts", t.quarantined_prompts);
  each("sampled_tokens", t.sampled_tokens);
  each("failures_in_a_row", t.failures_in_a_row);
}

template <class List>
void write_list(JsonWriter& json, const char* key, const List& values) {
  json.key(key).begin_array();
  for (const auto value : values) {
    if constexpr (std::is_same_v<std::decay_t<decltype(value)>, float>) {
      json.value(value);
    } else {
      json.value(static_cast<double>(value));
    }
  }
  json.end_array();
}

void write_rollout(JsonWriter& json, const Rollout& rollout) {
  json.begin_object().key("reward").value(rollout.reward);
  json.key("truncated").value(rollout.truncated).key("text").value(rollout.text);
  json.key("rewards").begin_array();
  for (const RewardPart& part : rollout.rewards) {
    json.begin_object().key("name").value(part.name).key("weight").value(part.weight);
    json.key("value").value(part.value).end_object();
  }
  json.end_array().key("steps").begin_array();
  for (const TrajectoryStep& step : rollout.steps) {
    json.begin_object();
    write_list(json, "prompt", step.prompt);
    write_list(json, "completion", step.completion);
    write_list(json, "logprobs", step.logprobs);
    write_list(json, "versions", step.versions);
    json.end_object();
  }
  json.end_array().end_object();
}

class Reader {
 public:
  Reader(const std::string& name, const EnvironmentMix& mix) : name_(name), mix_(mix) {}

  ScheduleState read(const Json& root) const {
    ScheduleState state;
    if (!root.IsObject() || integer(root, "format") != 1) fail("is no schedule of format 1");
    for_each_number(state, [&](const char* key, int64_t& to) { to = integer(root, key); });
    for (const Json& group : list(root, "finished")) state.finished.push_back(read_group(group));
    for (const Json& open : list(root, "open")) {
      const int64_t number = integer(open, "number");
      if (number >= state.next_group ||
          (!state.open.empty() && number <= state.open.back().first)) {
        fail(fmt::format("\"open\": group {} is no group that was drawn, or out of order", number));
      }
      state.open.emplace_back(number, integer(open, "failed_rounds"));
    }
    for (const Json& prompt : list(root, "prompt_failures")) {
      const size_t from = environment(prompt);
      state.prompt_failures[{from, example(prompt, from)}] = integer(prompt, "groups");
    }
    return state;
  }

 private:
  [[noreturn]] void fail(const std::string& problem) const {
    throw Error(fmt::format("{}: {}", name_, problem));
  }
  const Json& member(const Json& object, const char* key) const {
    if (!object.IsObject() || !object.HasMember(key)) fail(fmt::format("\"{}\" is missing", key));
    return object[key];
  }
  double number(const Json& object, const char* key) const {
    const Json& value = member(object, key);
    if (!value.IsNumber()) fail(fmt::format("\"{}\" is no number", key));
    return value.GetDouble();
  }
  int64_t integer(const Json& object, const char* key) const {
    const double value = number(object, key);
    if (value != std::floor(value) || value < 0 || value > 0x1p53) {
      fail(fmt::format("\"{}\" = {} is no count", key, value));
    }
    return static_cast<int64_t>(value);
  }
  rapidjson::GenericArray<true, Json> list(const Json& object, const char* key) const {
    const Json& value = member(object, key);
    if (!value.IsArray()) fail(fmt::format("\"{}\" is no list", key));
    return value.GetArray();
  }
  std::string text(const Json& object, const char* key) const {
    const Json& value = member(object, key);
    if (!value.IsString()) fail(fmt::format("\"{}\" is no text", key));
    return {value.GetString(), value.GetStringLength()};
  }
  size_t environment(const Json& object) const {
    const std::string id = text(object, "environment");
    for (size_t e = 0; e < mix_.members().size(); ++e) {
      if (mix_.members()[e].id == id) return e;
    }
    fail(fmt::format("the configuration has no environment \"{}\"", id));
  }
  uint64_t example(const Json& object, size_t environment) const {
    const auto index = static_cast<uint64_t>(integer(object, "example"));
    const auto size = mix_.members()[environment].environment->size(Split::train);
    if (size && index >= *size) {
      fail(fmt::format("\"example\" = {} is not among the {} of the environment", index, *size));
    }
    return index;
  }
  // Of T alone: a cast of any other number has no meaning.
  template <class T>
  std::vector<T> numbers(const Json& object, const char* key) const {
    std::vector<T> values;
    for (const Json& value : list(object, key)) {
      if (!value.IsNumber()) fail(fmt::format("\"{}\" holds something that is no number", key));
      const double number = value.GetDouble();
      const bool inside = number >= static_cast<double>(std::numeric_limits<T>::lowest()) &&
                          number <= static_cast<double>(std::numeric_limits<T>::max());
      if (!inside || (std::is_integral_v<T> && number != std::floor(number))) {
        fail(fmt::format("\"{}\" holds {}, which cannot be", key, number));
      }
      values.push_back(static_cast<T>(number));
    }
    return values;
  }

  Group read_group(const Json& json) const {
    Group group;
    group.number = integer(json, "number");
    group.environment = environment(json);
    const uint64_t index = example(json, group.environment);
    group.example = mix_.members()[group.environment].environment->example(Split::train, index);
    for (const Json& rollout : list(json, "rollouts")) {
      group.rollouts.push_back(read_rollout(rollout));
    }
    if (group.rollouts.empty()) fail(fmt::format("group {} has no \"rollouts\"", group.number));
    return group;
  }
  Rollout read_rollout(const Json& json) const {
    Rollout rollout;
    rollout.reward = number(json, "reward");
    rollout.text = text(json, "text");
    const Json& truncated = member(json, "truncated");
    if (!truncated.IsBool()) fail("\"truncated\" is neither true nor false");
    rollout.truncated = truncated.GetBool();
    for (const Json& part : list(json, "rewards")) {
      rollout.rewards.push_back(
          {text(part, "name"), number(part, "weight"), number(part, "value")});
    }
    for (const Json& from : list(json, "steps")) {
      TrajectoryStep& step = rollout.steps.emplace_back();
      step.prompt = numbers<int32_t>(from, "prompt");
      step.completion = numbers<int32_t>(from, "completion");
      step.logprobs = numbers<float>(from, "logprobs");
      step.versions = numbers<int32_t>(from, "versions");
      if (step.logprobs.size() != step.completion.size() ||
          step.versions.size() != step.completion.size()) {
        fail("the lists of a step have different lengths");
      }
      if (step.completion.empty()) fail("\"completion\" is empty");
    }
    if (rollout.steps.empty()) fail("a rollout has no \"steps\"");
    return rollout;
  }

  const std::string& name_;
  const EnvironmentMix& mix_;
};

}  // namespace

std::string schedule_state_json(const ScheduleState& state, const std::vector<std::string>& ids) {
  JsonWriter json;
  json.begin_object().key("format").value(1.0);
  for_each_number(state, [&](const char* key, int64_t value) {
    json.key(key).value(static_cast<double>(value));
  });
  json.key("open").begin_array();
  for (const auto& [number, failed_rounds] : state.open) {
    json.begin_object().key("number").value(static_cast<double>(number));
    json.key("failed_rounds").value(static_cast<double>(failed_rounds)).end_object();
  }
  json.end_array().key("prompt_failures").begin_array();
  for (const auto& [prompt, groups] : state.prompt_failures) {
    json.begin_object().key("environment").value(ids[prompt.first]);
    json.key("example").value(static_cast<double>(prompt.second));
    json.key("groups").value(static_cast<double>(groups)).end_object();
  }
  json.end_array().key("finished").begin_array();
  for (const Group& group : state.finished) {
    json.begin_object().key("number").value(static_cast<double>(group.number));
    json.key("environment").value(ids[group.environment]);
    json.key("example").value(static_cast<double>(group.example.index));
    json.key("rollouts").begin_array();
    for (const Rollout& rollout : group.rollouts) write_rollout(json, rollout);
    json.end_array().end_object();
  }
  return json.end_array().end_object().text() + "\n";
}

ScheduleState parse_schedule_state(const std::string& name, std::string_view json,
                                   const EnvironmentMix& mix) {
  return Reader(name, mix).read(parse_json(name, json));
}

}  // namespace leeway
