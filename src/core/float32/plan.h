// A LossSpec as the float32 implementations read it, on CPUs and GPUs alike: plain numbers that are
// passed by value. Bounds are float32, the precision they are compared in.
#pragma once

#include <cstdint>

#include "leeway/loss.h"

namespace leeway {

// Bits of a token's flags: what is decided before its own arithmetic.
enum TokenFlag : uint8_t {
  kPolicyDropped = 1,
  kPenaltyDropped = 2,
  kBelow = 4,
  kAbove = 8,
  kSelected = 16,
  kNarrowed = 32,  // a gate of scope `mask` took the token out
};

inline constexpr int kMaxGates = 6, kMaxWeights = 4, kMaxPenalties = 4;

struct PlannedGate {
  Quantity quantity;
  Level level;
  SignRule sign;
  GateScope scope;
  bool uses_ratio;    // its value is the spec's own ratio
  bool shares_ratio;  // its value is made from the spec's own ratio
  bool needs_exp;     // its value is made from the ratio of its pair
  int num, den;
  float low, high, log_clamp;
};

struct PlannedWeight {
  Level level;
  bool over_all;  // its statistic runs over masked positions too
  int num, den;
  float clamp_low, clamp_high, keep_low, keep_high, log_clamp, token_log_clamp;
};

struct PlannedPenalty {
  PenaltyKind kind;
  PenaltyGate gate;
  bool times_ratio;
  int num, den;
  float coefficient, slope;  // slope: with the sign toward pi, 0 without gradient
};

struct LossPlan {
  // Ratio.
  bool uses_ratio, token_ratio, geometric_ratio, through_mean, ratio_over_all;
  bool clamps_log;         // log_clamp or log_cap can act
  bool is_mismatch_ratio;  // the ratio is that of the metrics: pi / rollout of the token
  bool clips_by_sign;      // GMPO
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
  // Lists. Of the gates those come first that drop policy terms token by token.
  int token_gates, gate_count, weight_count, penalty_count;
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
  // Neither penalties nor shaping nor limits on a token's own ratio: most of the formula falls away
  // where the batch adds no weights or flags either.
  bool plain;
  // Streams that are read, as bits of Stream.
  unsigned reads;
};

// The plan of any spec, as far as the CPU needs it: sequences, corrections and batch-wide
// extensions are computed from the spec itself there, so lists may be cut at what a plan holds.
LossPlan make_loss_plan(const LossSpec& spec);

// Whether a spec is computed from its plan alone, as GPUs do: none of its corrections is a
// function, and it has no more gates, weights or penalties than a plan holds. The loss of another
// one is computed on the host.
bool has_complete_plan(const LossSpec& spec);

// That plan. Throws Error for a spec that has none.
LossPlan make_complete_plan(const LossSpec& spec);

}  // namespace leeway
