// A LossSpec as kernels read it: plain numbers, passed by value. Bounds are float32, the precision
// they are compared in.
#pragma once

#include "core/planned.h"
#include "leeway/loss.h"

namespace leeway::cuda {

inline constexpr int kMaxGates = 6, kMaxWeights = 4, kMaxPenalties = 4;

struct PlannedGate {
  Quantity quantity;
  Level level;
  SignRule sign;
  GateScope scope;
  int num, den;
  float low, high, log_clamp;
};

struct PlannedWeight {
  Level level;
  bool over_all;  // its statistic runs over masked positions too
  int num, den;
  float clamp_low, clamp_high, keep_low, keep_high, log_clamp, token_log_clamp;
};

struct LossPlan {
  // Ratio.
  bool uses_ratio, token_ratio, geometric_ratio, through_mean, ratio_over_all;
  bool clips_by_sign;  // GMPO
  int ratio_num, ratio_den;
  float log_clamp, log_cap, sign_clip_low, sign_clip_high;
  // Surrogate.
  SurrogateKind kind;
  bool by_ratio_alone;  // the log-probability itself carries no gradient
  float clip_low, clip_high, dual_clip, ratio_cap, tau_pos, tau_neg;
  // Shaping.
  float adv_tau, teacher_tau;
  int teacher;
  bool sequence_mean, constant_one, times_mask;
  // Lists.
  int gate_count, weight_count, penalty_count;
  PlannedGate gates[kMaxGates];
  PlannedWeight weights[kMaxWeights];
  PlannedPenalty penalties[kMaxPenalties];
  // Reduction and what looks at the whole batch.
  ReductionKind reduction;
  bool kept_denominator, count_empty, positions_all, has_clip;
  double fixed_length;
  WeightNormalisation normalisation;
  double m2_threshold;      // negative: none
  double covariance_ratio;  // negative: none
  // Every token's outcome needs nothing but its own numbers and its sequence's scale.
  bool token_level;
  // Streams that are read, as bits of Stream.
  unsigned reads;
};

// Throws Error for a spec that only the host can compute: a correction that is a function, or more
// gates, weights or penalties than a plan holds.
LossPlan make_loss_plan(const LossSpec& spec);

}  // namespace leeway::cuda
