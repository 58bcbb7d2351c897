// An environment for tests that is made of functions, and turns for it to give.
#pragma once

#include <fmt/format.h>

#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "orchestrator/environment.h"
#include "orchestrator/interfaces.h"
#include "orchestrator/split.h"

namespace leeway::testing {

// An environment made of functions. Prompts are "NAME train 7=": they say where they come from.
class FakeEnvironment : public Environment {
 public:
  using Respond = std::function<Turn(const Reply& reply, int64_t turn)>;  // turn: 1, 2, ..

  FakeEnvironment(std::string name, Respond respond)
      : name_(std::move(name)), respond_(std::move(respond)) {}

  std::optional<uint64_t> train_size, held_out_size;
  bool needs_a_renderer = false;
  std::function<void(const Example&)> on_start = [](const Example&) {};  // may throw
  bool asks = false;           // its episodes ask for samples, with the same answers to them
  bool scores_groups = false;  // and end without the reward, which score_group gives
  // Why a group cannot be scored, by its last replies; empty: it can.
  std::function<std::string(const std::vector<std::string>& texts)> score_failure_of =
      [](const std::vector<std::string>&) { return std::string(); };
  mutable int64_t groups_scored = 0;
  // Seconds for which an answer is pending, by a clock that must then be set; infinity: forever.
  std::function<double(const Reply& reply, int64_t turn)> wait_of;
  const Clock* clock = nullptr;

  std::optional<uint64_t> size(Split split) const override {
    return split == Split::train ? train_size : held_out_size;
  }
  Example example(Split split, uint64_t index) const override {
    Example example;
    example.index = index;
    example.messages = {
        {.role = Role::user,
         .content =
             fmt::format("{} {} {}=", name_, split == Split::train ? "train" : "held_out", index)}};
    return example;
  }
  std::unique_ptr<Episode> start(const Example& example, const EpisodePlace&) const override {
    on_start(example);
    if (asks) return std::make_unique<AskingEpisode>(*this, example);
    return std::make_unique<FakeEpisode>(*this);
  }
  std::unique_ptr<GroupScoring> score_group(const std::vector<Episode*>& episodes) const override {
    ++groups_scored;
    GroupScores scores;
    std::vector<std::string> texts;
    for (Episode* each : episodes) {
      const auto& episode = dynamic_cast<const AskingEpisode&>(*each);
      scores.members.push_back({episode.rewards, {}});
      texts.push_back(episode.reply.text);
    }
    scores.failure = score_failure_of(texts);
    return std::make_unique<FakeScoring>(std::move(scores));
  }
  bool needs_renderer() const override { return needs_a_renderer; }

 private:
  class FakeEpisode : public Episode {
   public:
    explicit FakeEpisode(const FakeEnvironment& environment) : environment_(environment) {}
    Turn respond(const Reply& reply) override {
      ++turn_;
      if (!environment_.wait_of) return environment_.respond_(reply, turn_);
      reply_ = reply;
      due_ = environment_.clock->now() + environment_.wait_of(reply, turn_);
      return poll();
    }
    Turn poll() override {
      if (environment_.wait_of && environment_.clock->now() >= due_) {
        return environment_.respond_(reply_, turn_);
      }
      return {.kind = Turn::Kind::pending};
    }

   private:
    const FakeEnvironment& environment_;
    Reply reply_;
    double due_ = 0.0;
    int64_t turn_ = 0;
  };
  // Ready when it is polled for the second time.
  struct FakeScoring : GroupScoring {
    explicit FakeScoring(GroupScores given) : scores(std::move(given)) {}
    std::optional<GroupScores> poll() override {
      if (!std::exchange(polled, true)) return std::nullopt;
      return scores;
    }
    GroupScores scores;
    bool polled = false;
  };

  // Repeats the whole context with every call.
  class AskingEpisode : public Episode {
   public:
    AskingEpisode(const FakeEnvironment& environment, const Example& example)
        : environment_(environment), context_(example.messages) {}
    bool asks() const override { return true; }
    Turn respond(const Reply&) override { return {.kind = Turn::Kind::failed, .failure = "asks"}; }
    void sampled(const SampleAnswer& answer) override {
      reply = answer.reply;
      refused_ = answer.refusal != SampleAnswer::Refusal::none;
      answered_ = true;
      const bool waits = environment_.wait_of && !refused_;
      due_ = waits ? environment_.clock->now() + environment_.wait_of(reply, turn_) : 0.0;
    }
    Turn poll() override {
      if (turn_ == 0) return ask();
      if (!answered_ || (due_ > 0.0 && environment_.clock->now() < due_)) {
        return {.kind = Turn::Kind::pending};
      }
      Turn turn = refused_ ? Turn() : environment_.respond_(reply, turn_);
      if (turn.kind == Turn::Kind::messages) {
        context_.push_back(message_of(reply));
        context_.insert(context_.end(), turn.messages.begin(), turn.messages.end());
        return ask();
      }
      if (turn.kind == Turn::Kind::reward && environment_.scores_groups) {
        rewards = std::exchange(turn.rewards, {});
        turn.kind = Turn::Kind::unscored;
      }
      return turn;
    }
    Reply reply;  // the last one
    std::vector<RewardPart> rewards;

   private:
    Turn ask() {
      answered_ = false;
      Turn turn{.kind = Turn::Kind::calls};
      turn.calls.push_back({.id = fmt::format("{}", ++turn_), .messages = context_});
      return turn;
    }
    const FakeEnvironment& environment_;
    std::vector<Message> context_;
    bool answered_ = false, refused_ = false;
    double due_ = 0.0;
    int64_t turn_ = 0;
  };

  std::string name_;
  Respond respond_;
};

inline Turn reward_turn(double value) { return {.rewards = {{"exact", 1.0, value}}}; }
inline Turn failed_turn(const std::string& message) {
  return {.kind = Turn::Kind::failed, .failure = message};
}
inline Turn question_turn(const std::string& words) {
  return {.kind = Turn::Kind::messages, .messages = {{.role = Role::user, .content = words}}};
}

// The first letter of a reply decides: F fails, X throws, N gives no number, T asks for another
// turn; others earn 1 if the reply contains an a, else 0.
inline Turn respond_by_letter(const Reply& reply, int64_t turn) {
  const std::string& text = reply.response.content;
  switch (text.empty() ? ' ' : text.front()) {
    case 'F': return failed_turn("the judge is away");
    case 'X': throw std::runtime_error("the judge broke");
    case 'N': return reward_turn(std::nan(""));
    case 'B': return reward_turn(1e39);  // no float32 holds it
    case 'T': return question_turn(fmt::format("more {}", turn));
    default: return reward_turn(text.find('a') == std::string::npos ? 0.0 : 1.0);
  }
}

}  // namespace leeway::testing
