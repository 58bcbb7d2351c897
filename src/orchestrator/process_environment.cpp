// Turns and rewards by the user's program, in any language. docs/environments.md describes the two
// protocols, process_pool.h and episode_pool.h what they do with processes.
#include <fmt/format.h>

#include <cmath>
#include <mutex>
#include <utility>

#include "leeway/error.h"
#include "orchestrator/conversation.h"
#include "orchestrator/environment_factories.h"
#include "orchestrator/episode_pool.h"
#include "orchestrator/jsonl_prompts.h"
#include "orchestrator/process_messages.h"
#include "orchestrator/process_pool.h"
#include "orchestrator/reward_names.h"
#include "text/messages_json.h"

namespace leeway {
namespace {

using Kind = JsonValue::Kind;

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
    turn.rewards = {{.name = "reward", .value = reward_number(*given, key)}};
  } else if (key == "rewards") {
    turn.rewards = read_rewards(*given);
  } else if (key == "messages") {
    turn.kind = Turn::Kind::messages;
    turn.messages = read_answer_messages(*given);
  } else {
    if (!given->is(Kind::string)) throw Error("error must be a string");
    turn.kind = Turn::Kind::failed;
    turn.failure = reported_error(given->text);
  }
  return turn;
}

// Names that a program chooses.
struct ProgramNames {
  RewardNames rewards, metrics;
};

class ProcessEpisode : public Episode {
 public:
  ProcessEpisode(std::shared_ptr<ProcessPool> pool, const Example& example)
      : pool_(std::move(pool)), messages_(example.messages), example_(example.answer) {}
  ~ProcessEpisode() override {
    if (request_ != 0) pool_->withdraw(request_);
  }

  Turn respond(const Reply& reply) override {
    messages_.push_back(message_of(reply));
    request_ = pool_->submit(
        one_line(fmt::format("\"turn\": {}, \"example\": {}, \"messages\": {}, \"reply\": {}",
                             ++turn_, example_, write_messages(messages_), reply_json(reply))));
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

// An episode of protocol 2.
class AskingEpisode : public Episode {
 public:
  AskingEpisode(std::shared_ptr<EpisodePool> pool, std::shared_ptr<ProgramNames> names,
                const Example& example, const EpisodePlace& place)
      : pool_(std::move(pool)),
        names_(std::move(names)),
        number_(
            pool_->start(place, example.index, example.answer.empty() ? "null" : example.answer)) {}
  ~AskingEpisode() override { pool_->withdraw(number_); }

  bool asks() const override { return true; }
  Turn respond(const Reply&) override {
    return {.kind = Turn::Kind::failed, .failure = "the program asks for samples itself"};
  }
  Turn poll() override {
    Turn turn = pool_->poll(number_);
    names_->rewards.cap(turn.rewards);
    names_->metrics.cap(turn.metrics);
    return turn;
  }
  void sampled(const SampleAnswer& answer) override { pool_->sampled(number_, answer); }
  uint64_t number() const { return number_; }

 private:
  std::shared_ptr<EpisodePool> pool_;
  std::shared_ptr<ProgramNames> names_;
  uint64_t number_;
};

class ProcessScoring : public GroupScoring {
 public:
  ProcessScoring(std::shared_ptr<EpisodePool> pool, std::shared_ptr<ProgramNames> names,
                 const std::vector<uint64_t>& episodes)
      : pool_(std::move(pool)), names_(std::move(names)), request_(pool_->score(episodes)) {}
  ~ProcessScoring() override { pool_->withdraw_score(request_); }

  std::optional<GroupScores> poll() override {
    std::optional<GroupScores> scores = pool_->poll_score(request_);
    if (!scores) return scores;
    for (GroupScores::Member& member : scores->members) {
      names_->rewards.cap(member.rewards);
      names_->metrics.cap(member.metrics);
    }
    return scores;
  }

 private:
  std::shared_ptr<EpisodePool> pool_;
  std::shared_ptr<ProgramNames> names_;
  uint64_t request_;
};

void check_table(const EnvironmentTable& table) {
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
    throw Error(fmt::format("max_output_bytes = {}: it must be positive", table.max_output_bytes));
  }
  if (table.data.empty() && !table.eval_data.empty()) {
    throw Error("eval_data without data: give both, or neither for a program of protocol 2");
  }
}

ProcessPoolSettings settings_of(const EnvironmentTable& table) {
  return {.command = table.command,
          .processes = table.processes,
          .turn_timeout = table.turn_timeout,
          .max_output_bytes = table.max_output_bytes,
          .limits = {.max_memory_bytes = table.max_memory_bytes,
                     .max_cpu_seconds = table.max_cpu_seconds,
                     .max_processes = table.max_processes}};
}

class ProcessEnvironment : public Environment {
 public:
  explicit ProcessEnvironment(const EnvironmentTable& table) {
    check_table(table);
    greeting_.processes.emplace(settings_of(table), std::vector<int>{1, 2});
    if (table.data.empty()) {
      read_sizes(table);
      return;
    }
    prompts_ =
        read_jsonl_prompts(table.data, table.eval_data,
                           {.prompt_key = table.prompt_key,
                            .demonstration_keys = {"completion"},
                            .keep = [](const JsonValue& object) { return to_json(object); }});
    sizes_ = {prompts_.train.size(), prompts_.held_out.size()};
  }

  std::optional<uint64_t> size(Split split) const override {
    return split == Split::train ? sizes_.first : sizes_.second;
  }

  Example example(Split split, uint64_t index) const override {
    Example example;
    example.index = index;
    if (prompts_.train.empty()) return example;  // the program has them
    example = prompts_.example(split, index);
    example.answer = prompts_.of(split)[index].kept;
    return example;
  }

  std::unique_ptr<Episode> start(const Example& example, const EpisodePlace& place) const override {
    const Pools pools = greet();
    if (pools.asking) return std::make_unique<AskingEpisode>(pools.asking, names_, example, place);
    return std::make_unique<ProcessEpisode>(pools.answering, example);
  }

  std::unique_ptr<GroupScoring> score_group(const std::vector<Episode*>& episodes) const override {
    std::vector<uint64_t> numbers;
    for (Episode* episode : episodes) {
      numbers.push_back(dynamic_cast<AskingEpisode&>(*episode).number());
    }
    return std::make_unique<ProcessScoring>(greet().asking, names_, numbers);
  }

  // A program may reply with messages whatever the prompts are, which cannot be known in advance.
  bool needs_renderer() const override { return prompts_.needs_renderer; }

  std::vector<std::string> take_log() const override {
    const std::lock_guard lock(greeting_.mutex);
    if (greeting_.processes) return greeting_.processes->take_log();
    return greeting_.pools.asking ? greeting_.pools.asking->take_log()
                                  : greeting_.pools.answering->take_log();
  }
  std::vector<std::string> take_warnings() const override {
    std::vector<std::string> warnings;
    for (RewardNames* names : {&names_->rewards, &names_->metrics}) {
      if (std::optional<std::string> warning = names->take_warning()) warnings.push_back(*warning);
    }
    return warnings;
  }

  void check() const override {
    greet();
    const std::lock_guard lock(greeting_.mutex);
    if (greeting_.problem.empty()) return;
    throw Error(
        fmt::format("its program does not work: {}. Run environment.command by hand and "
                    "give it the line {{\"type\": \"hello\", \"protocol\": 1}}: it has to "
                    "answer with the same line, or with protocol 2 (docs/environments.md)",
                    greeting_.problem));
  }

  int64_t take_unasked_answers() const override {
    const std::lock_guard lock(greeting_.mutex);
    if (greeting_.processes) return 0;
    return greeting_.pools.asking ? greeting_.pools.asking->take_unasked_answers()
                                  : greeting_.pools.answering->take_unasked_answers();
  }

 private:
  // One of them, by the protocol that the program has chosen. Episodes may outlive the environment.
  struct Pools {
    std::shared_ptr<ProcessPool> answering;
    std::shared_ptr<EpisodePool> asking;
  };
  struct Greeting {
    std::mutex mutex;
    std::optional<Processes> processes;  // before the first hello
    Pools pools;                         // after it
    std::string problem;
  };

  // Waits for the first hello, once. A program that says none counts as one of protocol 1, whose
  // turns report what is wrong.
  Pools greet() const {
    const std::lock_guard lock(greeting_.mutex);
    if (!greeting_.processes) return greeting_.pools;
    greeting_.problem = greeting_.processes->greet();
    if (greeting_.processes->protocol() == 2) {
      const EpisodeHello hello = read_hello(*greeting_.processes->hello());
      greeting_.pools.asking =
          std::make_shared<EpisodePool>(std::move(*greeting_.processes), hello.scores_groups);
    } else {
      greeting_.pools.answering = std::make_shared<ProcessPool>(
          std::move(*greeting_.processes), [names = names_](const JsonValue& answer) {
            Turn turn = read_answer(answer);
            names->rewards.cap(turn.rewards);
            return turn;
          });
    }
    greeting_.processes.reset();
    return greeting_.pools;
  }

  // Without `data` the program says how many examples there are.
  void read_sizes(const EnvironmentTable& table) {
    Processes& processes = *greeting_.processes;
    const std::string problem = processes.greet();
    const auto fail = [&](const std::string& what) {
      throw Error(
          fmt::format("data is missing, and command = {} {}", to_json(table.command), what));
    };
    if (!problem.empty()) fail("does not say how many examples it has: " + problem);
    if (processes.protocol() != 2) {
      fail(
          "speaks protocol 1, which has no examples of its own: give data, or a program of "
          "protocol 2 (docs/environments.md)");
    }
    EpisodeHello hello;
    try {
      hello = read_hello(*processes.hello());
    } catch (const Error& error) {
      fail(fmt::format("says: {}", error.what()));
    }
    if (!hello.train || !hello.eval) {
      fail("does not say in its hello how many examples it has: \"train\" and \"eval\"");
    }
    sizes_ = {*hello.train, *hello.eval};
  }

  JsonlPrompts prompts_;
  std::pair<std::optional<uint64_t>, std::optional<uint64_t>> sizes_;  // train, held out
  std::shared_ptr<ProgramNames> names_ = std::make_shared<ProgramNames>();
  mutable Greeting greeting_;
};

}  // namespace

std::unique_ptr<Environment> make_process_environment(const EnvironmentTable& table) {
  return std::make_unique<ProcessEnvironment>(table);
}

}  // namespace leeway
