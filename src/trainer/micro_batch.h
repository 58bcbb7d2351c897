// A part of a packed batch as the decoder and the head take it in one pass.
//
// A loss that looks past the mask sees a sample from its first trained token on: the rows before it
// have the weight 0.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <type_traits>
#include <vector>

#include "core/cpu/policy_head.h"
#include "data/packed_batch.h"
#include "model/cpu_decoder.h"

namespace leeway {

// Logprobs of other policies, for the streams that a loss reads; empty for others.
struct PolicyStreams {
  TokenValues prox, ref, teacher;
  // The pass's own logprobs serve as prox, which is correct if no optimizer step lies between the
  // two.
  bool prox_is_pi = false;
};

struct MicroBatch {
  std::vector<size_t> samples;      // indices of the samples it contains
  std::vector<int32_t> tokens;      // [N]
  std::vector<int64_t> cu_seqlens;  // [S + 1]
  std::vector<int64_t> targets;     // [N]
  std::vector<int64_t> rows;        // [R] trained rows, or all that the loss looks at
  std::vector<float> rollout, prox, ref, teacher, advantages, temperature;
  std::vector<float> weights;  // [N], 0 before a sample's first trained token; empty: ones
  std::vector<uint8_t> mask;
  std::vector<PolicyVersion> versions;
  std::vector<int32_t> rollout_ids;

  int64_t size() const { return static_cast<int64_t>(tokens.size()); }
  PackedTokens packed() const { return {tokens, cu_seqlens}; }
  // `pi` is the current policy's logprobs, also used as prox if the two are the same.
  BatchView<float> view(std::span<const float> pi, bool prox_is_pi) const;
  // `value` for each trained token [N]; empty if it is 0.
  std::vector<float> entropy_gradients(double value) const;
};

// Sample numbers of each micro-batch: rollouts kept whole, at most `max_tokens` rows (a longer
// rollout has a micro-batch of its own). Samples without rows are left out. `only`: if not empty,
// the numbers of the samples to take.
std::vector<std::vector<size_t>> plan_micro_batches(const PackedBatch& batch, int64_t max_tokens,
                                                    std::span<const size_t> only = {});

// Copies the rows of these samples out of the packed batch. What `into` held is overwritten; its
// memory is used again.
void gather(const PackedBatch& batch, std::span<const size_t> samples, MicroBatch& into);

// Copies a micro-batch's values [N] back to the tokens they belong to.
template <class Value>
void scatter(const MicroBatch& batch, std::type_identity_t<std::span<const Value>> values,
             std::vector<std::vector<Value>>& into) {
  for (size_t s = 0; s < batch.samples.size(); ++s) {
    std::copy(values.begin() + batch.cu_seqlens[s], values.begin() + batch.cu_seqlens[s + 1],
              into[batch.samples[s]].begin() + 1);
  }
}

}  // namespace leeway
