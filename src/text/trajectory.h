// Turns the steps of a rollout into training samples, by token identity.
//
// A step is one call of the policy: a prompt and the completion sampled after it. A step whose
// prompt starts with an earlier step's prompt and completion, token for token, extends that sample;
// any other step starts a new one. Nothing is ever re-tokenized: what was sampled is what is
// trained.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "data/sample.h"

namespace leeway {

struct TrajectoryStep {
  std::vector<int32_t> prompt;
  std::vector<int32_t> completion;
  std::vector<float> logprobs;          // of the completion; same length
  std::vector<PolicyVersion> versions;  // of the completion; same length, or empty: unknown (-1)
  std::vector<uint8_t> loss_mask;       // of the completion; same length, or empty: all trained
};

enum class BreakReason {
  sampled_tokens_changed,  // the prompt differs from what was sampled: stripped or re-tokenised
  context_changed,         // it differs before anything was sampled: the context was rebuilt
  context_shortened,       // it ends before the earlier tokens do
  forked,  // it starts with an earlier step's tokens, which another step has already extended
};
const char* name_of(BreakReason reason);

// Where a step's prompt diverges from the sample with which it shares the most.
struct PrefixBreak {
  size_t step = 0;          // the step that started a new sample
  size_t earlier_step = 0;  // the last step of the sample it was compared with
  size_t position = 0;      // of the first token that differs
  int32_t expected = -1;    // the earlier token there; -1: they have ended
  int32_t found = -1;       // the prompt's token there; -1: it has ended
  BreakReason reason = BreakReason::context_changed;
};

struct SplitTrajectory {
  // Without advantages. Where nothing was sampled: mask 0, log-probability 0, version and step -1.
  std::vector<Sample> samples;
  std::vector<PrefixBreak> breaks;     // one per sample except the first
  std::vector<size_t> sample_of_step;  // [steps]
};

// Linear in the number of tokens: prefixes are found by a rolling hash and then compared. Several
// prefixes stay live, so interleaved agents keep a sample each; the longest match is extended. A
// sampled token is trained exactly once: later prompts contain it as context. Throws Error naming
// the step if the lengths of its vectors disagree.
SplitTrajectory split_trajectory(const std::vector<TrajectoryStep>& steps);

}  // namespace leeway
