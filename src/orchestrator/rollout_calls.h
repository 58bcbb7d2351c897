// The samples that one episode asks for, from its first call to the steps of its rollout.
//
// A call whose messages begin with an earlier call's context and reply continues the sampled tokens
// (Conversation::next_prompt); any other is rendered anew, which replaces the context.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "data/sampling.h"
#include "orchestrator/conversation.h"
#include "orchestrator/environment.h"
#include "orchestrator/rollouts.h"

namespace leeway {

// Not thread-safe. Conversation and settings must outlive it.
class RolloutCalls {
 public:
  // What a call samples is determined by `seed` and its ordinal.
  RolloutCalls(const Conversation& conversation, const RolloutSettings& settings, uint64_t seed)
      : conversation_(conversation), settings_(settings), seed_(seed) {}

  // A call that is to be sampled, or one that is refused.
  struct Opened {
    size_t call = 0;  // its ordinal
    Request request;
    std::optional<SampleAnswer> refused;
  };
  // Throws Error for a call that makes no sense: messages that the renderer refuses, one that
  // continues a call without a reply, one after too many refusals.
  Opened open(const SampleCall& call);

  // The sampler's result of a call, which is not empty and has not failed. Throws Error if it
  // cannot be read.
  SampleAnswer close(size_t call, SampledSequence&& result);
  int64_t open_calls() const { return open_; }
  int64_t answered() const { return answered_; }
  // Why the last call that was refused was; empty if none was.
  const std::string& last_refusal() const { return last_refusal_; }

  // Fills the steps in the order of calls, what the episode says of them, and the last text. Throws
  // Error if it speaks of a call without a reply or gives a wrong number of advantages.
  void finish(const Turn& end, Rollout& rollout) &&;

 private:
  struct Call {
    std::vector<Message> context;  // in full, for the renderer
    std::vector<Message> seen;     // the same as the episode sees it
    RenderOptions options;
    bool trained = true;
    bool answered = false;
    Message told;  // the reply as the episode sees it
    Message said;  // as it is, for the renderer
    std::string text;
    bool truncated = false;
    TrajectoryStep step;
  };
  const Call* continued_by(const SampleCall& call, std::vector<Message>& added) const;
  SampleAnswer refuse(const SampleCall& call, SampleAnswer::Refusal refusal,
                      const std::string& message);

  const Conversation& conversation_;
  const RolloutSettings& settings_;
  uint64_t seed_;
  std::deque<Call> calls_;  // accepted ones, by ordinal
  std::map<std::string, size_t> by_id_;
  int64_t open_ = 0, answered_ = 0, refusals_ = 0;
  std::string last_refusal_;
};

}  // namespace leeway
