// Turns and rewards by the user's program, in any language: interprets requests and answers.
// docs/environments.md describes the protocol, process_pool.h the processes.
#include <fmt/format.h>

#include <cmath>
#include <cstdlib>
#include <utility>

#include "leeway/error.h"
#include "orchestrator/conversation.h"
#include "orchestrator/environment_factories.h"
#include "orchestrator/jsonl_prompts.h"
#include "orchestrator/process_pool.h"
#include "orchestrator/reward_names.h"
#include "text/byte_level.h"
#include "text/messages_json.h"

namespace leeway {
namespace {

using Kind = JsonValue::Kind;

// JSON text on one line: no line breaks between tokens, and U+FFFD for bytes that are not UTF-8,
// which a policy may well sample.
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

// Parts are metrics, in addition to those that every environment has.
void check_part_name(const std::string& name) {
  const bool plain = !name.empty() && name.find_first_not_of(
                                          "abcdefghijklmnopqrstuvwxyz"
                                          "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
                                          "0123456789_-.") == std::string::npos;
  if (plain && name != "mean" && name != "min" && name != "max") return;
  throw Error(fmt::format(
      "rewards has a part {}: a part's name must consist of letters, digits, '_', '-' and '.', "
      "and not be mean, min or max: it is part of metric names",
      to_json(name)));
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
      part.value = finite_number(*inside, fmt::format("rewards.{}.value", name));
      if (const JsonValue* weight = value.find("weight")) {
        part.weight = finite_number(*weight, fmt::format("rewards.{}.weight", name));
      }
    } else {
      part.value = finite_number(value, "rewards." + name);
    }
    parts.push_back(std::move(part));
  }
  return parts;
}

std::vector<Message> read_answer_messages(const JsonValue& value) {
  std::vector<Message> messages = read_messages("the answer", to_json(value));
  if (messages.empty()) throw Error("messages is empty; to end the rollout, send a reward");
  for (const Message& message : messages) {
    if (message.role != Role::tool && message.role != Role::user) {
      throw Error(fmt::format("messages has one of the role {}: it must be tool or user",
                              name_of(message.role)));
    }
    if (message.content_is_null) throw Error("messages has one without content");
  }
  return messages;
}

Turn read_answer(const JsonValue& answer) {
  const JsonValue* given = nullptr;
  std::string key;
  for (const char* name : {"reward", "rewards", "messages", "error"}) {
    const JsonValue* value = answer.find(name);
    if (value == nullptr) continue;
    if (given != nullptr) throw Error(fmt::format("{} and {}: give one", key, name));
    given = value;
    key = name;
  }
  if (given == nullptr) throw Error("an answer has one of reward, rewards, messages, error");
  Turn turn;
  if (key == "reward") {
    turn.rewards = {{.name = "reward", .value = finite_number(*given, key)}};
  } else if (key == "rewards") {
    turn.rewards = read_rewards(*given);
  } else if (key == "messages") {
    turn.kind = Turn::Kind::messages;
    turn.messages = read_answer_messages(*given);
  } else {
    if (!given->is(Kind::string)) throw Error("error must be a string");
    turn.kind = Turn::Kind::failed;
    turn.failure = "the program reports: " + given->text;
  }
  return turn;
}

class ProcessEpisode : public Episode {
 public:
  ProcessEpisode(std::shared_ptr<ProcessPool> pool, const Example& example)
      : pool_(std::move(pool)), messages_(example.messages), example_(example.answer) {}
  ~ProcessEpisode() override {
    if (request_ != 0) pool_->withdraw(request_);
  }

  Turn respond(const Reply& reply) override {
    const ParsedResponse& response = reply.response;
    messages_.push_back(message_of(reply));
    request_ = pool_->submit(one_line(fmt::format(
        "\"turn\": {}, \"example\": {}, \"messages\": {}, \"reply\": {{\"text\": {}, \"content\": "
        "{}, \"truncated\": {}, \"tool_calls\": {}}}",
        ++turn_, example_, write_messages(messages_), to_json(reply.text),
        to_json(response.content), reply.truncated, tool_calls_json(response.tool_calls))));
    return poll();
  }

  Turn poll() override {
    LEEWAY_CHECK(request_ != 0, "a turn is polled until it has a result");
    Turn turn = pool_->poll(request_);
    if (turn.kind == Turn::Kind::pending) return turn;
    request_ = 0;
    if (turn.kind != Turn::Kind::messages) return turn;
    messages_.insert(messages_.end(), turn.messages.begin(), turn.messages.end());
    return turn;
  }

 private:
  std::shared_ptr<ProcessPool> pool_;
  std::vector<Message> messages_;  // all so far
  std::string example_;            // the line of the file
  int64_t turn_ = 0;
  uint64_t request_ = 0;  // 0: none
};

class ProcessEnvironment : public Environment {
 public:
  explicit ProcessEnvironment(const EnvironmentTable& table) {
    if (table.command.empty()) {
      throw Error("command is missing: it is what answers turns, run by /bin/sh");
    }
    if (table.processes < 1) {
      throw Error(fmt::format("processes = {}: it must be at least 1", table.processes));
    }
    if (!(table.turn_timeout > 0.0) || !std::isfinite(table.turn_timeout)) {
      throw Error(fmt::format("turn_timeout = {}: it must be a positive number of seconds",
                              table.turn_timeout));
    }
    if (table.max_output_bytes < 1) {
      throw Error(
          fmt::format("max_output_bytes = {}: it must be positive", table.max_output_bytes));
    }
    prompts_ =
        read_jsonl_prompts(table.data, table.eval_data,
                           {.prompt_key = table.prompt_key,
                            .demonstration_keys = {"completion"},
                            .keep = [](const JsonValue& object) { return to_json(object); }});
    pool_ = std::make_shared<ProcessPool>(
        ProcessPoolSettings{.command = table.command,
                            .processes = table.processes,
                            .turn_timeout = table.turn_timeout,
                            .max_output_bytes = table.max_output_bytes,
                            .limits = {.max_memory_bytes = table.max_memory_bytes,
                                       .max_cpu_seconds = table.max_cpu_seconds,
                                       .max_processes = table.max_processes}},
        [names = names_](const JsonValue& answer) {
          Turn turn = read_answer(answer);
          names->cap(turn.rewards);
          return turn;
        });
  }

  std::optional<uint64_t> size(Split split) const override { return prompts_.of(split).size(); }

  Example example(Split split, uint64_t index) const override {
    Example example = prompts_.example(split, index);
    example.answer = prompts_.of(split)[index].kept;
    return example;
  }

  std::unique_ptr<Episode> start(const Example& example) const override {
    return std::make_unique<ProcessEpisode>(pool_, example);
  }

  // A program may reply with messages whatever the prompts are, which cannot be known in advance.
  bool needs_renderer() const override { return prompts_.needs_renderer; }

  std::vector<std::string> take_log() const override { return pool_->take_log(); }
  std::vector<std::string> take_warnings() const override {
    std::optional<std::string> warning = names_->take_warning();
    return warning ? std::vector{std::move(*warning)} : std::vector<std::string>();
  }

  void check() const override {
    const std::string problem = pool_->greet();
    if (problem.empty()) return;
    throw Error(
        fmt::format("its program does not work: {}. Run environment.command by hand and "
                    "give it the line {{\"type\": \"hello\", \"protocol\": 1}}: it has to "
                    "answer with the same line (docs/environments.md)",
                    problem));
  }

  int64_t take_unasked_answers() const override { return pool_->take_unasked_answers(); }

 private:
  JsonlPrompts prompts_;
  std::shared_ptr<RewardNames> names_ = std::make_shared<RewardNames>();
  std::shared_ptr<ProcessPool> pool_;  // episodes may outlive the environment
};

}  // namespace

std::unique_ptr<Environment> make_process_environment(const EnvironmentTable& table) {
  return std::make_unique<ProcessEnvironment>(table);
}

}  // namespace leeway
