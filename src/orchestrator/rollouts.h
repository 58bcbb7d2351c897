// Rollouts in progress: prompts go to the sampler, replies to their environment, until the
// environment ends them.
//
// Invariant: every rollout that is started gives exactly one RolloutOutcome: completed, failed or
// cancelled. A failure keeps its original message and never becomes a reward.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "config/run_config.h"
#include "orchestrator/conversation.h"
#include "orchestrator/environment.h"
#include "orchestrator/interfaces.h"
#include "text/trajectory.h"

namespace leeway {

// What the environment says of one step, besides the rollout's reward. Numbers are finite.
struct StepCredit {
  std::optional<double> reward;    // of this step alone
  std::vector<double> advantages;  // one per token of the completion; empty: none given
};

// A finished rollout.
struct Rollout {
  std::vector<TrajectoryStep> steps;  // one per turn of the policy
  std::vector<RewardPart> rewards;
  double reward = 0.0;
  bool truncated = false;                               // a length limit or max_turns ended it
  std::string text;                                     // of the last reply
  std::vector<StepCredit> credit;                       // empty, or one per step
  std::vector<std::pair<std::string, double>> metrics;  // the environment's; no part of the reward

  int64_t sampled_tokens() const;
  PolicyVersion oldest_version() const;  // of its tokens
};

enum class Outcome { completed, failed, cancelled };
struct RolloutOutcome {
  int64_t rollout = 0;  // the number passed to `start`
  Outcome outcome = Outcome::completed;
  Rollout result;  // completed
  FailureKind kind = FailureKind::environment_error;
  std::string message;  // failed: what went wrong; cancelled: the reason
};

// How replies are sampled.
struct RolloutSettings {
  SamplingSettings sampling;
  int64_t max_new_tokens = 64;  // of a turn
  int64_t max_turns = 8;
  int64_t max_length = 0;  // of prompt and replies together: the model's positions
  double timeout = 0.0;    // seconds from start to end, sampling and environment together; 0: none
};

// Not thread-safe. Everything it is constructed with must outlive it.
class RolloutDriver {
 public:
  RolloutDriver(const Conversation& conversation, Sampler& sampler, Clock& clock,
                const RolloutSettings& settings);
  ~RolloutDriver();

  // Starts rollouts of one example, whose first replies share one prompt unless their episodes ask
  // for samples; `rollouts` are the caller's numbers, none of which may be in progress. What they
  // sample is determined by `seed` and their position in the list. `first` is the place of the
  // first one, without its seed; the others are the members that follow it.
  void start(const Environment& environment, const Example& example,
             const std::vector<int64_t>& rollouts, uint64_t seed, EpisodePlace first = {});
  // Ends a rollout as cancelled; unknown or finished: false. Members of a request that others
  // still use are sampled to their end and dropped.
  bool cancel(int64_t rollout, const std::string& reason);

  // Returns outcomes since the last call; lets the sampler and environments work for up to about
  // `seconds`.
  std::vector<RolloutOutcome> poll(double seconds);
  // Rollouts since the last call that ended without a reward. They are still running, and have no
  // deadline, until they are cancelled or `score` has given them one.
  std::vector<int64_t> take_unscored() { return std::exchange(unscored_, {}); }
  // Has unscored rollouts of one group scored together, in the order of members. Each completes or
  // fails then.
  void score(const std::vector<int64_t>& rollouts);
  int64_t running() const { return static_cast<int64_t>(rollouts_.size()); }
  // Seconds since the start for which nothing was sampled, since all rollouts were with their
  // environments.
  double waited_for_environments() const { return waited_for_environments_; }

 private:
  struct Running;
  struct Wait {
    std::vector<int64_t> rollouts;  // by sample; -1: no longer wanted
    int64_t open = 0;
    size_t call = 0;  // of an episode that asks
  };
  struct Scoring {
    std::vector<int64_t> rollouts;  // -1: no longer wanted
    std::unique_ptr<GroupScoring> scoring;
  };
  void submit(const std::vector<int64_t>& rollouts, const std::vector<int32_t>& prompt,
              uint64_t seed);
  void take(Running& running, size_t call, SampledSequence&& result);
  void advance(Running& running, const Turn& turn);
  void open_calls(Running& running, const std::vector<SampleCall>& calls);
  void end_episode(Running& running, const Turn& turn);
  void poll_scorings();
  void poll_environments();
  void end_late_rollouts();
  void forget_requests(int64_t rollout);
  void end(int64_t rollout, RolloutOutcome&& outcome);
  void fail(int64_t rollout, FailureKind kind, const std::string& message);
  void complete(Running& running, const std::vector<RewardPart>& rewards);

  const Conversation& conversation_;
  Sampler& sampler_;
  Clock& clock_;
  double waited_for_environments_ = 0.0;
  RolloutSettings settings_;
  double next_look_ = 0.0;     // next check of deadlines
  std::set<int64_t> pending_;  // rollouts waiting for their environment
  std::map<int64_t, std::unique_ptr<Running>> rollouts_;
  std::map<int64_t, Wait> waits_;  // by request
  std::vector<Scoring> scorings_;
  std::vector<int64_t> unscored_;  // not told yet
  std::vector<RolloutOutcome> outcomes_;
};

}  // namespace leeway
