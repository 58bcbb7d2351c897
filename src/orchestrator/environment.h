// What a policy is trained on: prompts, what happens after each of its turns, and the reward.
//
// Environments speak of messages and text; tokens are the business of conversation.h. An example
// is decided by its number alone, so that a run can be repeated and resumed: no environment has a
// state of its own.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "config/run_config.h"
#include "text/renderer.h"

namespace leeway {

// Prompts that are trained on, and those kept for evaluation. No prompt is in both.
enum class Split { train, held_out };

// One task. `messages` is what the policy sees first; without a renderer it is one user message
// whose content is the prompt's text, byte for byte.
struct Example {
  uint64_t index = 0;  // what `example` was asked for
  std::vector<Message> messages;
  std::string tools_json;  // for the renderer; empty: none
  std::string answer;      // what the verifier compares with
  // A reply that earns the full reward, for SFT on demonstrations; several turns alternate with
  // what the environment says. Empty: the environment cannot make any.
  std::vector<Message> demonstration;
};

// What the policy wrote in one turn.
struct Reply {
  std::string text;         // as sampled, decoded, the stop token spelled out
  ParsedResponse response;  // by the renderer; without one, content is `text`, closed is false
  bool truncated = false;   // ended by a length limit, not by a stop token
};

// Named parts of a reward; the reward is the sum of weight * value.
struct RewardPart {
  std::string name;
  double weight = 1.0;
  double value = 0.0;
};

// Why a rollout has no result. One policy serves all kinds; they are told apart in counts and
// messages.
enum class FailureKind { environment_error, empty, exception, timeout, bad_answer, sampler_error };
const char* name_of(FailureKind kind);

// What the environment does after a turn: goes on with messages, or ends with a reward, or fails
// (an outcome that is retried; never a reward), or has not made up its mind yet (`pending`).
struct Turn {
  enum class Kind { messages, reward, failed, pending };
  Kind kind = Kind::reward;
  std::vector<Message> messages;  // tool or user messages
  std::vector<RewardPart> rewards;
  std::string failure;
  FailureKind failure_kind = FailureKind::environment_error;
};

// One rollout's state between turns. Used by one thread at a time.
class Episode {
 public:
  virtual ~Episode() = default;
  // Must not wait for others: what takes time is begun here and ends in `poll`.
  virtual Turn respond(const Reply& reply) = 0;
  // After `pending`: what came of it, or `pending` still. Called again and again; must not wait.
  virtual Turn poll() { return {.kind = Turn::Kind::failed, .failure = "nothing is pending"}; }
};

// Immutable after it is made; every method may be called from several threads at once.
class Environment {
 public:
  virtual ~Environment() = default;

  // Number of examples of the split; nothing: without end.
  virtual std::optional<uint64_t> size(Split split) const = 0;
  // Example `index` (below size). The same index gives the same example, whatever was asked before.
  virtual Example example(Split split, uint64_t index) const = 0;
  virtual std::unique_ptr<Episode> start(const Example& example) const = 0;
  // True where turns go back and forth, or a prompt is more than one user message: plain text
  // cannot say who speaks.
  virtual bool needs_renderer() const = 0;
  // What it has to say for the run's log since the last call, line by line.
  virtual std::vector<std::string> take_log() const { return {}; }
  // Whether it can work: starts what it needs and waits for it to be ready. Throws Error with the
  // reason and the remedy. Called before a run begins.
  virtual void check() const {}
  // Answers of its programs that nothing had asked for, since the last call.
  virtual int64_t take_unasked_answers() const { return 0; }
  // What the user should know of how it behaves, since the last call.
  virtual std::vector<std::string> take_warnings() const { return {}; }
};

// By the table's name. `seed` decides the examples of generated environments. Throws Error: a file
// that is missing or empty; a line of it that is no JSON object or lacks a key (file, line, key); a
// regular expression that is none; a held-out split that shares a prompt with training.
std::unique_ptr<Environment> make_environment(const EnvironmentTable& table, uint64_t seed);

// Which environment a prompt comes from, and which example of it: the n-th draw of a run depends
// on n, the weights and the seed alone. Finite environments are gone through epoch by epoch, each
// in an order of its own.
class EnvironmentMix {
 public:
  struct Member {
    std::string id;
    double weight = 1.0;
    std::unique_ptr<Environment> environment;
  };
  // Throws Error without members, for weights that are not positive, and for a member without
  // examples to train on.
  EnvironmentMix(std::vector<Member> members, uint64_t seed);

  struct Draw {
    size_t member = 0;
    uint64_t example = 0;  // index in the member's training split
    uint64_t epoch = 0;    // of a finite environment
  };
  // Draw number n (0, 1, ..). Constant time on average when n goes up by one; an n below the last
  // is counted anew from 0. One thread at a time.
  Draw draw(uint64_t n);
  const std::vector<Member>& members() const { return members_; }

 private:
  std::vector<Member> members_;
  uint64_t seed_;
  uint64_t next_ = 0;            // draws before this one are counted in taken_
  std::vector<uint64_t> taken_;  // of each member
  std::vector<std::pair<uint64_t, std::vector<uint64_t>>> orders_;  // an epoch and its order
};

// All of a configuration's environments. Ids are unique. Throws Error as make_environment, naming
// [[environment]] and its number.
EnvironmentMix make_environments(const std::vector<EnvironmentTable>& tables, uint64_t seed);

}  // namespace leeway
