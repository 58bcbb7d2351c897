// Samples side by side as the decoder and the head take them.
//
// Row t of a sample predicts its token t + 1, so a sample of L ids has L - 1 rows; those after its
// last trained token are left out, for nothing depends on them. Token values therefore stand one
// row earlier than in the sample. A loss that looks past the mask sees a sample from its first
// trained token on: the rows before it have the weight 0.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "core/cpu/policy_head.h"
#include "data/sample.h"
#include "model/cpu_decoder.h"

namespace leeway {

// Log-probabilities of other policies, for the streams a loss reads; empty where it does not.
struct PolicyStreams {
  TokenValues prox, ref, teacher;
  // The log-probabilities of the pass itself stand for prox: what it is when no optimizer step lies
  // between the two.
  bool prox_is_pi = false;
};

struct MicroBatch {
  std::vector<size_t> samples;      // numbers of the samples it holds
  std::vector<int32_t> tokens;      // [N]
  std::vector<int64_t> cu_seqlens;  // [S + 1]
  std::vector<int64_t> targets;     // [N]
  std::vector<int64_t> rows;        // [R] rows that are trained, or all that the loss looks at
  std::vector<float> rollout, prox, ref, teacher, advantages, temperature;
  std::vector<float> weights;  // [N], 0 before a sample's first trained token; empty: ones
  std::vector<uint8_t> mask;
  std::vector<int32_t> versions, rollout_ids;

  int64_t size() const { return static_cast<int64_t>(tokens.size()); }
  PackedTokens packed() const { return {tokens, cu_seqlens}; }
  // `pi` stands for the current policy, and for prox where that is the same.
  BatchView<float> view(std::span<const float> pi, bool prox_is_pi) const;
  // `value` for each trained token [N]; empty if it is 0.
  std::vector<float> entropy_gradients(double value) const;
};

// Packs the samples, rollouts kept whole, into micro-batches of at most `max_tokens` rows (a longer
// rollout has its own). Samples without a trained token are left out. `every_row`: the loss looks
// at tokens that are not trained too, so that all rows are kept, and computed from each sample's
// first trained token on. `only`: if not empty, the numbers of the samples to take.
std::vector<MicroBatch> make_micro_batches(std::span<const Sample> samples,
                                           const PolicyStreams& streams, int64_t max_tokens,
                                           bool every_row, std::span<const size_t> only = {});

// Puts a micro-batch's values [N] back to the tokens they belong to.
void scatter(const MicroBatch& batch, std::span<const float> values, TokenValues& into);

}  // namespace leeway
