// What the vector kernel's inner loop reads of a spec.
#pragma once

#include "core/cpu/token_kernel.h"
#include "leeway/loss.h"

namespace leeway {

inline constexpr int kMaxGates = 4, kMaxPenalties = 4;

// The spec as the inner loop reads it: float32 constants in one local object, so that the compiler
// knows that no store of a gradient can change them.
struct PlannedGate {
  Quantity quantity;
  SignRule sign;
  bool uses_r;        // its value is the spec's own ratio
  bool shares_ratio;  // it is made from the spec's own ratio
  bool needs_exp;     // it is made from the ratio of its pair
  bool drops_penalty;
  int num, den;
  float low, high, log_clamp;
};
struct TokenPlan {
  explicit TokenPlan(const LossSpec& spec, const TokenInputs& in);

  bool simple;  // neither weights, flags, penalties nor shaping: most of the loop falls away
  bool uses_ratio, token_ratio, clamps_log, is_mismatch_ratio, has_clip;
  bool has_rollout, has_ref, has_teacher;
  int ratio_den;
  float log_clamp, log_cap;
  SurrogateKind kind;
  float clip_low, clip_high, dual_clip, ratio_cap, tau_pos, tau_neg;
  bool by_ratio_alone;
  float adv_tau, teacher_tau;
  int teacher;
  bool sequence_mean, constant_one, times_mask;
  int gate_count = 0, penalty_count = 0;
  PlannedGate gates[kMaxGates];
  PlannedPenalty penalties[kMaxPenalties];
};

}  // namespace leeway
