// What a policy is trained on: prompts, the response to each of its turns, and the reward.
//
// Environments work with messages and text; conversation.h handles tokens. An example is determined
// by its index alone, so that a run can be repeated and resumed: environments have no state.
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

// Prompts for training, and those held out for evaluation. No prompt is in both.
enum class Split { train, held_out };

// One task. `messages` is what the policy sees first; without a renderer it is one user message
// whose content is the prompt's text, byte for byte.
struct Example {
  uint64_t index = 0;  // the index passed to `example`
  std::vector<Message> messages;
  std::string tools_json;  // for the renderer; empty: none
  std::string answer;      // what the verifier compares with
  // A reply that earns the full reward, for SFT on demonstrations; multiple turns alternate with
  // the environment's messages. Empty if the environment cannot provide one.
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

// Why a rollout has no result. All kinds are handled by one failure policy; counts and messages
// distinguish them.
enum class FailureKind { environment_error, empty, exception, timeout, bad_answer, sampler_error };
const char* name_of(FailureKind kind);

// The environment's response to a turn: further messages, or a final reward, or a failure (which is
// retried and never becomes a reward), or not ready yet (`pending`).
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
  // Must not block: work that takes time is started here and finished in `poll`.
  virtual Turn respond(const Reply& reply) = 0;
  // After `pending`: the result, or `pending` again. Called repeatedly; must not block.
  virtual Turn poll() { return {.kind = Turn::Kind::failed, .failure = "nothing is pending"}; }
};

// Immutable after construction; all methods are thread-safe.
class Environment {
 public:
  virtual ~Environment() = default;

  // Number of examples in the split; nothing if unlimited.
  virtual std::optional<uint64_t> size(Split split) const = 0;
  // Example `index` (below size). The same index always gives the same example.
  virtual Example example(Split split, uint64_t index) const = 0;
  virtual std::unique_ptr<Episode> start(const Example& example) const = 0;
  // True if there are several turns, or if a prompt is more than one user message: plain text
  // cannot express who speaks.
  virtual bool needs_renderer() const = 0;
  // Lines for the run's log since the last call.
  virtual std::vector<std::string> take_log() const { return {}; }
  // Checks that it can work: starts what it needs and waits until it is ready. Throws Error with
  // the reason and the remedy. Called before a run starts.
  virtual void check() const {}
  // Unsolicited answers of its programs since the last call.
  virtual int64_t take_unasked_answers() const { return 0; }
  // Warnings for the user about its behaviour since the last call.
  virtual std::vector<std::string> take_warnings() const { return {}; }
};

// Creates an environment by the table's name. `seed` determines the examples of generated
// environments. Throws Error for a missing or empty file, a line that is not a JSON object or lacks
// a key (with file, line and key), an invalid regular expression, and a held-out split that shares
// a prompt with training.
std::unique_ptr<Environment> make_environment(const EnvironmentTable& table, uint64_t seed);

// Chooses which environment a prompt comes from, and which of its examples: the n-th draw of a run
// depends only on n, the weights and the seed. Finite environments are traversed epoch by epoch,
// each in its own order.
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
  // Draw number n (0, 1, ..). Constant time on average when n increases by one; a smaller n than
  // the last restarts from 0. Not thread-safe.
  Draw draw(uint64_t n);
  const std::vector<Member>& members() const { return members_; }

 private:
  std::vector<Member> members_;
  uint64_t seed_;
  uint64_t next_ = 0;            // draws before this one are counted in taken_
  std::vector<uint64_t> taken_;  // of each member
  std::vector<std::pair<uint64_t, std::vector<uint64_t>>> orders_;  // an epoch and its order
};

// All environments of a configuration. Ids are unique. Throws Error like make_environment, naming
// [[environment]] and its number.
EnvironmentMix make_environments(const std::vector<EnvironmentTable>& tables, uint64_t seed);

}  // namespace leeway
