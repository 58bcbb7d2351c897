// The losses that tests of the trainer go through.
#pragma once

#include <string>
#include <vector>

#include "core/test_support.h"

namespace leeway::testing {

// Every kind of loss that the trainer treats differently: token by token, by sequence, across the
// batch, over masked positions. `clean`: it looks at tokens that are not trained.
struct LossCase {
  NamedPreset preset;
  bool clean = false;
};

inline std::vector<LossCase> loss_cases() {
  const auto text = [](const char* value) { return std::string(value); };
  return {
      {with("icepop")},
      {with("grpo+tis", {{"ref_kl", 0.1}})},
      {with("dapo")},
      {with("gspo", {{"gradient", text("through_mean")}})},
      {with("cispo")},
      {with("m2po", {{"m2_threshold", 0.02}})},
      {with("geo_mask", {{"geo_ratio_low", 0.9}, {"geo_ratio_high", 1.1}})},
      {with("dppo_kl", {{"kl_tau", 0.3}})},
      {with("reinforce")},
      {with("reinforce", {{"reduction", text("seq_mean_token_mean")}})},
      {with("icepop", {{"reduction", text("seq_mean_token_sum")}})},
      {with("icepop", {{"reduction", text("fixed_length")}, {"fixed_length", 40.0}})},
      {with("icepop", {{"reduction", text("sum")}})},
      {with("geo_mask", {{"denominator", text("kept")}})},
      {with("icepop", {{"teacher_tau", 0.3}})},
      {with("verl/vanilla")},
      {with("verl/vanilla+IS", {{"level", text("token")}, {"batch_norm", true}})},
      {with("verl/vanilla", {{"agg", text("seq-mean-token-sum-norm")}}), true},
      {with("verl/kl_cov", {{"kl_cov_ratio", 0.2}})},
      {with("cookbook/gspo"), true},
      {with("liger/luspo"), true},
  };
}

}  // namespace leeway::testing
