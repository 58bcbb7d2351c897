#include "orchestrator/episode_messages.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "leeway/error.h"
#include "orchestrator/conversation.h"
#include "orchestrator/process_messages.h"
#include "text/messages_json.h"

namespace leeway {
namespace {

using Kind = JsonValue::Kind;

constexpr double kMostExamples = 1e8;  // of a split: they are shuffled in memory

// The member, or null if it is absent or null.
const JsonValue* member(const JsonValue& line, const char* key, Kind kind) {
  const JsonValue* value = line.find(key);
  if (value == nullptr || value->is(Kind::null)) return nullptr;
  if (!value->is(kind)) {
    throw Error(fmt::format("{} must be {}, not {}", key, name_of(kind), name_of(value->kind)));
  }
  return value;
}

std::optional<bool> flag(const JsonValue& line, const char* key) {
  const JsonValue* value = member(line, key, Kind::boolean);
  return value == nullptr ? std::nullopt : std::optional<bool>(value->truth);
}

// A call's id: a string, or a number as it is written.
std::string id_of(const JsonValue& line, const char* key) {
  const JsonValue* value = line.find(key);
  const bool known = value != nullptr && (value->is(Kind::string) || value->is(Kind::number));
  if (!known || value->text.empty()) throw Error(fmt::format("{} must be a string", key));
  if (value->text.size() > 256) throw Error(fmt::format("{} has more than 256 bytes", key));
  return value->text;
}

std::optional<std::optional<uint64_t>> size_of(const JsonValue& hello, const char* key) {
  const JsonValue* value = hello.find(key);
  if (value == nullptr) return std::nullopt;
  if (value->is(Kind::null)) return std::optional<uint64_t>();
  const double number = value->is(Kind::number) ? std::strtod(value->text.c_str(), nullptr) : 0.0;
  if (!(number >= 1.0) || number > kMostExamples || number != std::floor(number)) {
    throw Error(
        fmt::format("{} = {} in its hello: it must be a number of examples from 1 to {:.0f}, or "
                    "null for an unlimited number",
                    key, to_json(*value), kMostExamples));
  }
  return std::optional<uint64_t>(static_cast<uint64_t>(number));
}

// "reward" or "rewards"; empty if there is neither.
std::vector<RewardPart> read_reward(const JsonValue& line) {
  const JsonValue* one = line.find("reward");
  const JsonValue* parts = line.find("rewards");
  const bool has_one = one != nullptr && !one->is(Kind::null);
  const bool has_parts = parts != nullptr && !parts->is(Kind::null);
  if (has_one && has_parts) throw Error("reward and rewards: give one");
  if (has_one) return {{.name = "reward", .value = reward_number(*one, "reward")}};
  if (has_parts) return read_rewards(*parts);
  return {};
}

CallCredit& credit_of(std::vector<CallCredit>& credit, const std::string& call) {
  const auto found = std::find_if(credit.begin(), credit.end(),
                                  [&](const CallCredit& each) { return each.call == call; });
  if (found != credit.end()) return *found;
  return credit.emplace_back(CallCredit{.call = call});
}

std::vector<CallCredit> read_credit(const JsonValue& line) {
  std::vector<CallCredit> credit;
  if (const JsonValue* rewards = member(line, "turn_rewards", Kind::object)) {
    for (const auto& [call, value] : rewards->members) {
      credit_of(credit, call).reward = reward_number(value, "turn_rewards." + call);
    }
  }
  if (const JsonValue* advantages = member(line, "advantages", Kind::object)) {
    for (const auto& [call, value] : advantages->members) {
      const std::string name = "advantages." + call;
      std::vector<double>& to = credit_of(credit, call).advantages;
      if (!value.is(Kind::array)) {
        to = {finite_number(value, name)};
        continue;
      }
      if (value.items.empty()) throw Error(name + " is an empty list");
      for (const JsonValue& each : value.items) to.push_back(finite_number(each, name));
    }
  }
  return credit;
}

}  // namespace

EpisodeHello read_hello(const JsonValue& hello) {
  return {.train = size_of(hello, "train"),
          .eval = size_of(hello, "eval"),
          .scores_groups = flag(hello, "scores_groups").value_or(false)};
}

std::optional<uint64_t> read_number(const JsonValue& line, std::string_view key) {
  const JsonValue* value = line.find(key);
  if (value == nullptr || !value->is(Kind::number)) return std::nullopt;
  const double number = std::strtod(value->text.c_str(), nullptr);
  if (!(number >= 0.0 && number <= 0x1p53) || number != std::floor(number)) return std::nullopt;
  return static_cast<uint64_t>(number);
}

SampleCall read_sample(const JsonValue& line) {
  SampleCall call;
  call.id = id_of(line, "id");
  const JsonValue* messages = line.find("messages");
  if (messages == nullptr) throw Error("messages are missing");
  call.messages = read_messages("sample", to_json(*messages));
  if (call.messages.empty()) throw Error("messages is empty");
  if (call.messages.back().role == Role::assistant) {
    throw Error("the last of messages is the assistant's: it is the policy that speaks next");
  }
  const JsonValue* continues = line.find("continue");
  if (continues != nullptr && !continues->is(Kind::null)) {
    call.continues = id_of(line, "continue");
    for (const Message& message : call.messages) {
      if (message.role != Role::assistant) continue;
      throw Error("continue: messages are those that follow the reply, none of the assistant");
    }
  }
  if (const JsonValue* tools = member(line, "tools", Kind::array)) {
    for (const JsonValue& tool : tools->items) {
      if (!tool.is(Kind::object)) throw Error("tools must be a list of objects");
    }
    call.tools_json = tools->items.empty() ? "" : to_json(*tools);
  }
  if (const JsonValue* most = member(line, "max_new_tokens", Kind::number)) {
    const double number = finite_number(*most, "max_new_tokens");
    if (!(number >= 1.0) || number != std::floor(number)) {
      throw Error(fmt::format("max_new_tokens = {}: it must be at least 1", most->text));
    }
    call.max_new_tokens = static_cast<int64_t>(std::min(number, 0x1p53));
  }
  if (const JsonValue* temperature = member(line, "temperature", Kind::number)) {
    const double number = finite_number(*temperature, "temperature");
    // What the sampler takes: below the least, logits overflow.
    if (number != 0.0 && !(number >= 1e-4 && number <= 1e6)) {
      throw Error(fmt::format("temperature = {}: it must be 0, or from 0.0001 to 1000000",
                              temperature->text));
    }
    call.temperature = static_cast<float>(number);
  }
  call.enable_thinking = flag(line, "enable_thinking");
  call.train = flag(line, "train").value_or(true);
  return call;
}

EpisodeEnd read_done(const JsonValue& line, bool scores_groups) {
  EpisodeEnd end;
  end.turn.rewards = read_reward(line);
  if (end.turn.rewards.empty()) {
    if (!scores_groups) {
      throw Error("done has neither reward nor rewards, and its hello did not say scores_groups");
    }
    end.turn.kind = Turn::Kind::unscored;
  }
  if (const JsonValue* metrics = member(line, "metrics", Kind::object)) {
    end.turn.metrics = read_numbers(*metrics, "metrics");
  }
  end.turn.credit = read_credit(line);
  end.turn.truncated = flag(line, "truncated");
  const JsonValue* info = member(line, "info", Kind::object);
  end.info = info == nullptr ? "{}" : to_json(*info);
  return end;
}

GroupScores read_scores(const JsonValue& line, size_t members) {
  GroupScores scores;
  if (const JsonValue* error = member(line, "error", Kind::string)) {
    scores.failure = reported_error(error->text);
    return scores;
  }
  const JsonValue* rewards = member(line, "rewards", Kind::array);
  if (rewards == nullptr) throw Error("scores have a list of rewards, or an error");
  if (rewards->items.size() != members) {
    throw Error(
        fmt::format("rewards has {} entries for {} episodes", rewards->items.size(), members));
  }
  for (const JsonValue& reward : rewards->items) {
    GroupScores::Member& to = scores.members.emplace_back();
    if (reward.is(Kind::object)) {
      to.rewards = read_rewards(reward);
    } else {
      to.rewards = {{.name = "reward", .value = reward_number(reward, "rewards")}};
    }
  }
  if (const JsonValue* metrics = member(line, "metrics", Kind::array)) {
    if (metrics->items.size() != members) {
      throw Error(
          fmt::format("metrics has {} entries for {} episodes", metrics->items.size(), members));
    }
    for (size_t i = 0; i < members; ++i) {
      if (metrics->items[i].is(Kind::null)) continue;
      scores.members[i].metrics = read_numbers(metrics->items[i], "metrics");
    }
  }
  return scores;
}

std::string episode_line(uint64_t id, const EpisodePlace& place, uint64_t index,
                         const std::string& example) {
  return one_line(fmt::format(
      "{{\"type\": \"episode\", \"id\": {}, \"split\": \"{}\", \"index\": {}, \"example\": {}, "
      "\"group\": {}, \"member\": {}, \"members\": {}, \"seed\": {}}}",
      id, place.split == Split::train ? "train" : "eval", index, example, place.group, place.member,
      place.members, place.seed));
}

std::string sampled_line(uint64_t episode, const SampleAnswer& answer) {
  const std::string head = fmt::format("{{\"type\": \"sampled\", \"episode\": {}, \"id\": {}",
                                       episode, to_json(answer.id));
  if (answer.refusal != SampleAnswer::Refusal::none) {
    const bool turns = answer.refusal == SampleAnswer::Refusal::max_turns;
    return one_line(fmt::format("{}, \"error\": \"{}\", \"message\": {}}}", head,
                                turns ? "max_turns" : "context_length", to_json(answer.message)));
  }
  const std::string list = write_messages({message_of(answer.reply)});
  return one_line(
      fmt::format("{}, \"message\": {}, \"reply\": {}, \"tokens\": {}, "
                  "\"prompt_tokens\": {}}}",
                  head, list.substr(1, list.size() - 2), reply_json(answer.reply), answer.tokens,
                  answer.prompt_tokens));
}

std::string cancel_line(uint64_t episode) {
  return fmt::format("{{\"type\": \"cancel\", \"episode\": {}}}", episode);
}

std::string score_line(uint64_t id, int64_t group, const std::vector<ScoredEpisode>& episodes) {
  std::string list;
  for (const ScoredEpisode& episode : episodes) {
    if (!list.empty()) list += ", ";
    list += fmt::format("{{\"id\": {}, \"index\": {}, \"info\": {}}}", episode.id, episode.index,
                        episode.info);
  }
  return one_line(
      fmt::format("{{\"type\": \"score_group\", \"id\": {}, \"group\": {}, \"episodes\": [{}]}}",
                  id, group, list));
}

}  // namespace leeway
