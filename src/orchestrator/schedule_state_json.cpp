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

// Lists every counter with its name, for both writing and reading.
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

constexpr FailureKind kFailureKinds[] = {
    FailureKind::environment_error, FailureKind::empty,      FailureKind::exception,
    FailureKind::timeout,           FailureKind::bad_answer, FailureKind::sampler_error};

template <class Counts, class Each>
void for_each_count(Counts& counts, Each&& each) {
  each("cancelled_stale", counts.cancelled_stale);
  each("cancelled_dropped", counts.cancelled_dropped);
  each("partial_groups", counts.partial_groups);
  each("quarantined_draws", counts.quarantined_draws);
}
template <class Counts, class Each>
void for_each_environment_count(Counts& counts, Each&& each) {
  each("errored", counts.errored);
  each("empty", counts.empty);
  each("dropped_groups", counts.dropped_groups);
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
    if (!step.loss_mask.empty()) write_list(json, "loss_mask", step.loss_mask);
    json.end_object();
  }
  json.end_array();
  if (!rollout.credit.empty()) {
    json.key("credit").begin_array();
    for (const StepCredit& credit : rollout.credit) {
      json.begin_object();
      if (credit.reward) json.key("reward").value(*credit.reward);
      write_list(json, "advantages", credit.advantages);
      json.end_object();
    }
    json.end_array();
  }
  if (!rollout.metrics.empty()) {
    json.key("metrics").begin_array();
    for (const auto& [name, value] : rollout.metrics) {
      json.begin_object().key("name").value(name).key("value").value(value).end_object();
    }
    json.end_array();
  }
  json.end_object();
}

void write_counts(JsonWriter& json, const ScheduleCounts& counts,
                  const std::vector<std::string>& ids) {
  const auto number = [&](const char* key, int64_t value) {
    json.key(key).value(static_cast<double>(value));
  };
  json.key("counts").begin_object();
  for_each_count(counts, number);
  json.key("failures").begin_array();
  for (const auto& [kind, failures] : counts.failures) {
    json.begin_object().key("kind").value(name_of(kind));
    number("rollouts", failures);
    json.end_object();
  }
  json.end_array().key("environments").begin_array();
  for (size_t e = 0; e < counts.errored.size(); ++e) {
    json.begin_object().key("environment").value(ids[e]);
    for_each_environment_count(
        counts, [&](const char* key, const auto& values) { number(key, values[e]); });
    json.end_object();
  }
  json.end_array().key("given_up").begin_array();
  for (const DroppedGroup& group : counts.given_up) {
    json.begin_object();
    number("number", group.number);
    json.key("environment").value(ids[group.environment]);
    json.key("example").value(static_cast<double>(group.example));
    number("survivors", group.survivors);
    json.key("trained").value(group.trained).key("message").value(group.message).end_object();
  }
  json.end_array().end_object();
}

class Reader {
 public:
  Reader(const std::string& name, const EnvironmentMix& mix) : name_(name), mix_(mix) {}

  ScheduleState read(const Json& root) const {
    ScheduleState state;
    if (!root.IsObject() || integer(root, "format") != 1) fail("is not a schedule in format 1");
    for_each_number(state, [&](const char* key, auto& to) {
      using Number = std::remove_cvref_t<decltype(to)>;
      const int64_t value = integer(root, key);
      if (value > std::numeric_limits<Number>::max()) {
        fail(fmt::format("\"{}\" = {} is not a count", key, value));
      }
      to = static_cast<Number>(value);
    });
    for (const Json& group : list(root, "finished")) state.finished.push_back(read_group(group));
    for (const Json& open : list(root, "open")) {
      const int64_t number = integer(open, "number");
      if (number >= state.next_group ||
          (!state.open.empty() && number <= state.open.back().first)) {
        fail(fmt::format("\"open\": group {} was not drawn, or is out of order", number));
      }
      state.open.emplace_back(number, integer(open, "failed_rounds"));
    }
    for (const Json& prompt : list(root, "prompt_failures")) {
      const size_t from = environment(prompt);
      state.prompt_failures[{from, example(prompt, from)}] = integer(prompt, "groups");
    }
    state.counts = ScheduleCounts(mix_.members().size());
    // States written by earlier versions have no counts.
    if (root.HasMember("counts")) read_counts(root["counts"], state.counts);
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
    if (!value.IsNumber()) fail(fmt::format("\"{}\" is not a number", key));
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
    if (!value.IsArray()) fail(fmt::format("\"{}\" is not a list", key));
    return value.GetArray();
  }
  bool flag(const Json& object, const char* key) const {
    const Json& value = member(object, key);
    if (!value.IsBool()) fail(fmt::format("\"{}\" is neither true nor false", key));
    return value.GetBool();
  }
  std::string text(const Json& object, const char* key) const {
    const Json& value = member(object, key);
    if (!value.IsString()) fail(fmt::format("\"{}\" is not a string", key));
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
  FailureKind kind(const Json& object) const {
    const std::string name = text(object, "kind");
    for (const FailureKind each : kFailureKinds) {
      if (name == name_of(each)) return each;
    }
    fail(fmt::format("\"kind\" = \"{}\" is not a kind of failure", name));
  }
  // Only for values that fit T: casting any other number is undefined.
  template <class T>
  std::vector<T> numbers(const Json& object, const char* key) const {
    std::vector<T> values;
    for (const Json& value : list(object, key)) {
      if (!value.IsNumber())
        fail(fmt::format("\"{}\" contains something that is not a number", key));
      const double number = value.GetDouble();
      const bool inside = number >= static_cast<double>(std::numeric_limits<T>::lowest()) &&
                          number <= static_cast<double>(std::numeric_limits<T>::max());
      if (!inside || (std::is_integral_v<T> && number != std::floor(number))) {
        fail(fmt::format("\"{}\" contains {}, which is impossible", key, number));
      }
      values.push_back(static_cast<T>(number));
    }
    return values;
  }

  void read_counts(const Json& json, ScheduleCounts& counts) const {
    if (!json.IsObject()) fail("\"counts\" is not an object");
    for_each_count(counts, [&](const char* key, int64_t& to) { to = integer(json, key); });
    for (const Json& failure : list(json, "failures")) {
      counts.failures[kind(failure)] = integer(failure, "rollouts");
    }
    for (const Json& each : list(json, "environments")) {
      const size_t e = environment(each);
      for_each_environment_count(
          counts, [&](const char* key, auto& values) { values[e] = integer(each, key); });
    }
    for (const Json& group : list(json, "given_up")) {
      const size_t from = environment(group);
      counts.given_up.push_back({integer(group, "number"), from, example(group, from),
                                 integer(group, "survivors"), flag(group, "trained"),
                                 text(group, "message")});
    }
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
    rollout.truncated = flag(json, "truncated");
    for (const Json& part : list(json, "rewards")) {
      rollout.rewards.push_back(
          {text(part, "name"), number(part, "weight"), number(part, "value")});
    }
    for (const Json& from : list(json, "steps")) {
      TrajectoryStep& step = rollout.steps.emplace_back();
      step.prompt = numbers<int32_t>(from, "prompt");
      step.completion = numbers<int32_t>(from, "completion");
      step.logprobs = numbers<float>(from, "logprobs");
      step.versions = numbers<PolicyVersion>(from, "versions");
      if (step.logprobs.size() != step.completion.size() ||
          step.versions.size() != step.completion.size()) {
        fail("the lists of a step have different lengths");
      }
      if (step.completion.empty()) fail("\"completion\" is empty");
      if (!from.HasMember("loss_mask")) continue;  // all trained
      step.loss_mask = numbers<uint8_t>(from, "loss_mask");
      if (step.loss_mask.size() != step.completion.size()) {
        fail("the lists of a step have different lengths");
      }
    }
    if (json.HasMember("credit")) read_credit(json, rollout);
    if (json.HasMember("metrics")) {
      for (const Json& metric : list(json, "metrics")) {
        rollout.metrics.emplace_back(text(metric, "name"), number(metric, "value"));
      }
    }
    if (rollout.steps.empty()) fail("a rollout has no \"steps\"");
    return rollout;
  }

  void read_credit(const Json& json, Rollout& rollout) const {
    for (const Json& from : list(json, "credit")) {
      StepCredit& credit = rollout.credit.emplace_back();
      if (from.IsObject() && from.HasMember("reward")) credit.reward = number(from, "reward");
      credit.advantages = numbers<double>(from, "advantages");
      const size_t step = rollout.credit.size() - 1;
      const bool fits = step < rollout.steps.size() &&
                        (credit.advantages.empty() ||
                         credit.advantages.size() == rollout.steps[step].completion.size());
      if (!fits) fail("\"credit\" does not fit the steps");
    }
    if (rollout.credit.size() != rollout.steps.size()) fail("\"credit\" does not fit the steps");
  }

  const std::string& name_;
  const EnvironmentMix& mix_;
};

}  // namespace

std::string schedule_state_json(const ScheduleState& state, const std::vector<std::string>& ids) {
  JsonWriter json(JsonWriter::Text::raw);  // sampled text comes back byte for byte
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
  json.end_array();
  write_counts(json, state.counts, ids);
  json.key("finished").begin_array();
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
