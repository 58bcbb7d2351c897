// A batch's samples laid side by side once, as flat lists: minibatches and micro-batches are lists
// of sample numbers into it.
//
// Row t of a sample predicts its token t + 1, so a sample of L ids has L - 1 rows; those after its
// last trained token are left out, because nothing depends on them. Token values therefore stand
// one row earlier than in the sample. A sample without a trained token has no rows.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "data/sample.h"

namespace leeway {

struct PackedBatch {
  std::vector<int64_t> first_row;  // [S + 1]: sample s has the rows first_row[s] .. first_row[s+1]
  std::vector<std::vector<size_t>> rollouts;  // sample numbers by rollout
  std::vector<int32_t> rollout_ids;           // [S], samples of one rollout share it
  std::vector<float> temperature;             // [S]
  std::vector<int32_t> tokens;                // [N]
  std::vector<int64_t> targets;               // [N]
  std::vector<uint8_t> mask;                  // [N]
  std::vector<float> advantages;              // [N]
  std::vector<float> rollout;                 // [N], or empty
  std::vector<PolicyVersion> versions;        // [N], or empty
  // With `every_row` [N]: 0 before a sample's first trained token, 1 from there on; else empty.
  std::vector<float> weights;
  // Log-probabilities under other policies [N], filled in when they are known; empty until then.
  std::vector<float> prox, ref, teacher;

  size_t samples() const { return rollout_ids.size(); }
  int64_t rows_of(size_t sample) const { return first_row[sample + 1] - first_row[sample]; }
  int64_t trained_of(size_t sample) const;  // tokens
};

// `every_row`: the loss looks at tokens that are not trained too, so that a sample's rows after its
// last trained token are kept.
PackedBatch pack_samples(std::span<const Sample> samples, bool every_row);

// From one list per sample to the batch's rows [N]. Empty input gives an empty result.
std::vector<float> pack_values(const PackedBatch& batch, const TokenValues& values);
// The inverse: one list per sample with an entry per id, 0 where there is no row.
TokenValues unpack_values(const PackedBatch& batch, std::span<const Sample> samples,
                          std::span<const float> values);

}  // namespace leeway
