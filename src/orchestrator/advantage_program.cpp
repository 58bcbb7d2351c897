#include "orchestrator/advantage_program.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <utility>

#include "base/json.h"
#include "base/utf8.h"
#include "leeway/error.h"
#include "orchestrator/process_messages.h"

namespace leeway {
namespace {

using Kind = JsonValue::Kind;

constexpr double kPollSlice = 0.0005;     // seconds between two looks at the process
constexpr double kWaitSlice = 0.05;       // seconds between two looks at should_stop
constexpr double kLongestBackoff = 60.0;  // seconds
constexpr size_t kLongestReason = 200;    // bytes of a reason that are kept
constexpr int64_t kMostOutput = int64_t{16} << 20;

// The first line of a program's text, cut to a length that fits logs.
std::string short_text(const std::string& text) {
  std::string line = text.substr(0, text.find_first_of("\r\n"));
  if (line.size() > kLongestReason) {
    line.resize(kLongestReason);
    line.resize(valid_utf8_prefix(line));
    line += " ..";
  }
  return line;
}

GroupVerdict read_verdict(const JsonValue& answer, size_t rollouts) {
  GroupVerdict verdict;
  const JsonValue* advantages = answer.find("advantages");
  const JsonValue* drop = answer.find("drop");
  if ((advantages != nullptr) == (drop != nullptr)) {
    throw Error("an answer has one of advantages, drop, error");
  }
  if (drop != nullptr) {
    if (!drop->is(Kind::string) || drop->text.empty()) {
      throw Error("drop must be a string, the reason");
    }
    verdict.drop = short_text(drop->text);
    return verdict;
  }
  if (!advantages->is(Kind::array) || advantages->items.size() != rollouts) {
    throw Error(fmt::format("advantages must be a list of {} numbers, one per rollout", rollouts));
  }
  for (const JsonValue& each : advantages->items) {
    if (!each.is(Kind::number)) {
      throw Error(fmt::format("advantages has {}: it must consist of numbers", name_of(each.kind)));
    }
    const double value = std::strtod(each.text.c_str(), nullptr);
    // The comparison also rejects NaN.
    if (!(std::abs(value) <= std::numeric_limits<float>::max())) {
      throw Error(
          fmt::format("advantages has {}: it must be a number that a float32 can hold", each.text));
    }
    verdict.advantages.push_back(value);
  }
  return verdict;
}

// What a request says of a group, without type and id.
std::string members_of(const Group& group, const std::string& environment) {
  JsonWriter json;
  json.begin_object().key("environment").value(environment);
  json.key("example").value(static_cast<double>(group.example.index));
  const auto list = [&](const char* key, auto&& each) {
    json.key(key).begin_array();
    for (const Rollout& rollout : group.rollouts) each(rollout);
    json.end_array();
  };
  list("rewards", [&](const Rollout& rollout) { json.value(rollout.reward); });
  list("parts", [&](const Rollout& rollout) {
    json.begin_object();
    for (const RewardPart& part : rollout.rewards) json.key(part.name).value(part.value);
    json.end_object();
  });
  list("lengths",
       [&](const Rollout& rollout) { json.value(static_cast<double>(rollout.sampled_tokens())); });
  list("truncated", [&](const Rollout& rollout) { json.value(rollout.truncated); });
  const std::string text = json.end_object().text();
  return text.substr(1, text.size() - 2);
}

}  // namespace

AdvantageProgram::AdvantageProgram(const OrchestratorTable& table, Clock& clock)
    : table_(table),
      clock_(clock),
      pool_({.command = table.advantage_command,
             .processes = 1,
             .turn_timeout = table.advantage_timeout,
             .max_output_bytes = kMostOutput,
             .limits = {},
             .request_type = "group",
             .command_key = "orchestrator.advantage_command",
             .timeout_key = "orchestrator.advantage_timeout",
             .output_key = "orchestrator.advantage_command"},
            [this](const JsonValue& answer) {
              Turn turn;
              if (const JsonValue* error = answer.find("error")) {
                if (!error->is(Kind::string)) throw Error("error must be a string");
                turn.kind = Turn::Kind::failed;
                turn.failure = reported_error(error->text);
                return turn;
              }
              verdict_ = read_verdict(answer, rollouts_);
              return turn;
            }) {}

AdvantageProgram::~AdvantageProgram() = default;

void AdvantageProgram::check() {
  const std::string problem = pool_.greet();
  if (problem.empty()) return;
  throw Error(fmt::format(
      "orchestrator.advantage_command does not work: {}. Run it by hand and give it the line "
      "{{\"type\": \"hello\", \"protocol\": 1}}: it has to answer with the same line "
      "(docs/environments.md)",
      problem));
}

// Leaves what went wrong in `failure`.
GroupVerdict AdvantageProgram::ask_once(const Group& group, const std::string& members,
                                        const std::function<bool()>& should_stop,
                                        std::string& failure) {
  rollouts_ = group.rollouts.size();
  const uint64_t request = pool_.submit(members);
  for (;;) {
    const Turn turn = pool_.poll(request);
    if (turn.kind == Turn::Kind::pending) {
      if (should_stop()) {
        pool_.withdraw(request);
        failure = "it has not answered yet";
        return {};
      }
      clock_.sleep(kPollSlice);
      continue;
    }
    failure = turn.kind == Turn::Kind::failed ? turn.failure : "";
    return std::exchange(verdict_, {});
  }
}

std::vector<GroupVerdict> AdvantageProgram::ask(std::span<const Group> groups,
                                                const std::vector<std::string>& ids,
                                                const std::function<bool()>& should_stop) {
  std::vector<GroupVerdict> verdicts;
  for (const Group& group : groups) {
    const std::string members = members_of(group, ids[group.environment]);
    std::string failure;
    double backoff = table_.retry_backoff;
    for (int64_t asked = 1;; ++asked) {
      GroupVerdict verdict = ask_once(group, members, should_stop, failure);
      if (failure.empty()) {
        verdicts.push_back(std::move(verdict));
        break;
      }
      const auto& most = table_.max_error_reschedule_attempts;
      const bool stop = should_stop();
      if (stop || (most && asked >= *most)) {
        throw Error(fmt::format(
            "orchestrator.advantage_command has no advantages for group {} of {}, example {}, "
            "asked {} times{}; the last failure: {}",
            group.number, ids[group.environment], group.example.index, asked,
            stop ? ", and the run was asked to stop"
                 : " (orchestrator.max_error_reschedule_attempts)",
            failure));
      }
      log_.push_back(fmt::format("group {} is asked for again: {}", group.number, failure));
      const double until = clock_.now() + std::min(backoff, kLongestBackoff);
      while (clock_.now() < until && !should_stop()) {
        clock_.sleep(std::min(kWaitSlice, until - clock_.now()));
      }
      backoff *= 2.0;
    }
  }
  return verdicts;
}

std::vector<std::string> AdvantageProgram::take_log() {
  std::vector<std::string> lines = pool_.take_log();
  for (std::string& line : std::exchange(log_, {})) lines.push_back(std::move(line));
  return lines;
}

}  // namespace leeway
