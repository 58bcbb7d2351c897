// What the trainer is given: token ids and what is known of each.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "model/model_config.h"

namespace leeway {

// One sequence. Lists have one entry per id, `advantages` alternatively one for all; optional ones
// may be empty, in all samples or in none. Values at tokens that are not trained are not looked at,
// unless the loss looks past the mask, as those of some code bases do: then all from the first
// trained token on are.
struct Sample {
  std::vector<int32_t> ids;
  std::vector<uint8_t> loss_mask;  // 1: trained. The first token has nothing to predict it: 0
  std::vector<float> advantages;
  std::vector<float> rollout;     // optional: log-probabilities when sampled
  std::vector<int32_t> versions;  // optional: of the policy that sampled a token
  float temperature = 1.0f;       // that it was sampled at; log-probabilities are taken there
  int32_t rollout_id = -1;        // samples of one rollout share it; -1: one of its own

  float advantage(size_t token) const { return advantages[advantages.size() == 1 ? 0 : token]; }
};

// Log-probabilities of samples' tokens: one list per sample, one entry per id, 0 where a token is
// not trained (unless the loss looks past the mask).
using TokenValues = std::vector<std::vector<float>>;

// The samples' numbers, those of a rollout together, in the order of each rollout's first.
std::vector<std::vector<size_t>> samples_by_rollout(std::span<const Sample> samples);

// Throws Error naming sample, list and position: no ids, lists of another length, an optional list
// that only some samples have, ids outside the vocabulary, more ids than the model has positions, a
// mask that is neither 0 nor 1, a trained first token, an advantage or log-probability of a trained
// token that is not finite, a temperature that is not positive or has no finite inverse.
void check_samples(const ModelConfig& config, std::span<const Sample> samples);

}  // namespace leeway
