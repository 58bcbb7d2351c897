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

// A sample that an episode asks for: a context of its own making.
struct SampleCall {
  std::string id;  // unique within the episode
  // The whole context, or, with `continues`, what follows that call's reply. The last message is
  // not the assistant's.
  std::vector<Message> messages;
  std::optional<std::string> continues;   // id of an earlier call that has been answered
  std::optional<std::string> tools_json;  // absent: those of the call whose context it continues
  std::optional<int64_t> max_new_tokens;  // at least 1; cut to the run's
  std::optional<float> temperature;       // another than the run's: its tokens are not trained
  std::optional<bool> enable_thinking;
  bool train = true;
};

// What came of a call: a reply, or a refusal after which the episode should end.
struct SampleAnswer {
  enum class Refusal { none, max_turns, context_length };
  std::string id;
  Refusal refusal = Refusal::none;
  std::string message;  // refused: in words
  Reply reply;
  int64_t tokens = 0, prompt_tokens = 0;
};

// What an episode says of one of its calls as it ends.
struct CallCredit {
  std::string call;
  std::optional<double> reward;
  std::vector<double> advantages;  // empty: none; one: of all tokens; else one per token
};

// Named numbers to be logged.
using NamedNumbers = std::vector<std::pair<std::string, double>>;

// The environment's response to a turn: further messages, or a final reward, or a failure (which is
// retried and never becomes a reward), or not ready yet (`pending`). An episode that asks for
// samples itself has `calls` instead of messages, and may end `unscored`: Environment::score_group
// gives the reward when all of its group have ended.
struct Turn {
  enum class Kind { messages, reward, failed, pending, calls, unscored };
  Kind kind = Kind::reward;
  std::vector<Message> messages = {};  // tool or user messages
  std::vector<SampleCall> calls = {};
  std::vector<RewardPart> rewards = {};
  std::string failure = {};
  FailureKind failure_kind = FailureKind::environment_error;
  // reward and unscored, of episodes that ask for samples
  NamedNumbers metrics = {};
  std::vector<CallCredit> credit = {};
  std::optional<bool> truncated = {};  // absent: a call was refused, or the last reply cut off
};

// Where an episode stands in its run.
struct EpisodePlace {
  Split split = Split::train;
  int64_t group = 0;                // its number among the groups of the split
  int64_t member = 0, members = 1;  // which of how many of its group
  uint64_t seed = 0;                // for random choices of its own; below 2^53
};

// One rollout's state between turns. Used by one thread at a time.
//
// An episode either responds to the policy's turns, the first of which follows the example's
// messages, or `asks`: it begins by itself, `poll` brings the samples that it wants, several at a
// time if it likes, and `sampled` gives it what came of each.
class Episode {
 public:
  virtual ~Episode() = default;
  virtual bool asks() const { return false; }
  // Must not block: work that takes time is started here and finished in `poll`. Never called if it
  // asks.
  virtual Turn respond(const Reply& reply) = 0;
  // After `pending`: the result, or `pending` again. Called repeatedly; must not block. If it asks:
  // called from its start to its end, also while calls are open.
  virtual Turn poll() { return {.kind = Turn::Kind::failed, .failure = "nothing is pending"}; }
  // Once per call, in any order. Must not block.
  virtual void sampled(const SampleAnswer&) {}
};

// The scores of a group, once they are there: one per member, or a failure of all.
struct GroupScores {
  struct Member {
    std::vector<RewardPart> rewards;
    NamedNumbers metrics;  // in addition to those of its end
  };
  std::vector<Member> members;
  std::string failure;  // not empty: there are no scores
  FailureKind failure_kind = FailureKind::environment_error;
};

// Scoring in progress; no longer wanted when destroyed. Used by one thread at a time.
class GroupScoring {
 public:
  virtual ~GroupScoring() = default;
  // Nothing as long as it is not ready. Must not block.
  virtual std::optional<GroupScores> poll() = 0;
};

// Immutable after construction; all methods are thread-safe.
class Environment {
 public:
  virtual ~Environment() = default;

  // Number of examples in the split; nothing if unlimited.
  virtual std::optional<uint64_t> size(Split split) const = 0;
  // Example `index` (below size). The same index always gives the same example.
  virtual Example example(Split split, uint64_t index) const = 0;
  virtual std::unique_ptr<Episode> start(const Example& example,
                                         const EpisodePlace& place = {}) const = 0;
  // Scores episodes that ended unscored, all of one group, in the order of members. Must not block.
  // The environment has such episodes, or this is never called.
  virtual std::unique_ptr<GroupScoring> score_group(const std::vector<Episode*>& episodes) const;
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
