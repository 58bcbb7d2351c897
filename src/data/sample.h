// Training samples: token ids with their masks, advantages and logprobs.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "data/policy_version.h"

namespace leeway {

// One sequence. Lists have one entry per id; `advantages` may instead have one for all. Optional
// lists may be empty, in all samples of a batch or in none. Values at tokens that are not trained
// are ignored, unless the loss looks past the mask, as those of some code bases do: then all from
// the first trained token on are used.
struct Sample {
  std::vector<int32_t> ids;
  std::vector<uint8_t> loss_mask;  // 1: trained. 0 for the first token, which nothing predicts
  std::vector<float> advantages;
  std::vector<float> rollout;           // optional: logprobs when sampled
  std::vector<PolicyVersion> versions;  // optional: of the policy that sampled a token
  std::vector<int32_t> step;            // optional: the rollout's turn that sampled a token, or -1
  float temperature = 1.0f;             // at which it was sampled; logprobs are computed at it
  int32_t rollout_id = -1;              // shared by the samples of one rollout; -1: unique

  float advantage(size_t token) const { return advantages[advantages.size() == 1 ? 0 : token]; }
};

// The samples of one update.
struct TrainingBatch {
  int64_t step = 0;  // 1, 2, ..
  std::vector<Sample> samples;
  // Seconds in which rollouts went on while the learner had nothing else to do than wait for it.
  double waited = 0.0;
};

// Numbers of samples' tokens, such as log-probabilities: one list per sample, one entry per id, 0
// where a token is not trained (unless the loss looks past the mask).
using TokenValues = std::vector<std::vector<float>>;
// Flags (0 or 1) for samples' tokens, in the same form.
using TokenFlags = std::vector<std::vector<uint8_t>>;

// The samples' indices grouped by rollout, in the order of each rollout's first sample.
std::vector<std::vector<size_t>> samples_by_rollout(std::span<const Sample> samples);

}  // namespace leeway
