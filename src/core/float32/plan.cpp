#include "core/float32/plan.h"

#include <fmt/format.h>

#include "core/cpu/policy_head.h"
#include "core/participation.h"
#include "leeway/error.h"

namespace leeway {
namespace {

float narrow(double value) { return static_cast<float>(value); }

bool drops_by_token(const Gate& gate) {
  return gate.level == Level::token && gate.scope != GateScope::mask;
}

PlannedGate plan_gate(const LossSpec& spec, const Gate& gate) {
  const bool same_ratio = uses_ratio_of(spec) && spec.ratio.level == Level::token &&
                          gate.pair == spec.ratio.pair && gate.log_clamp == spec.ratio.log_clamp &&
                          spec.ratio.log_cap == kInfinity;
  const bool from_ratio = gate.quantity == Quantity::ratio || gate.quantity == Quantity::k3 ||
                          gate.quantity == Quantity::binary_kl;
  return {gate.quantity,
          gate.level,
          gate.sign,
          gate.scope,
          same_ratio && gate.quantity == Quantity::ratio,
          same_ratio && from_ratio,
          from_ratio,
          static_cast<int>(gate.pair.numerator),
          static_cast<int>(gate.pair.denominator),
          narrow(gate.keep.low),
          narrow(gate.keep.high),
          narrow(gate.log_clamp)};
}

PlannedWeight plan_weight(const Weight& w) {
  return {w.level,
          w.over == Positions::all,
          static_cast<int>(w.pair.numerator),
          static_cast<int>(w.pair.denominator),
          narrow(w.clamp.low),
          narrow(w.clamp.high),
          narrow(w.keep.low),
          narrow(w.keep.high),
          narrow(w.log_clamp),
          narrow(w.token_log_clamp)};
}

PlannedPenalty plan_penalty(const Penalty& p) {
  const double toward_pi =
      (p.pair.numerator == Stream::pi) - static_cast<double>(p.pair.denominator == Stream::pi);
  return {p.kind,
          p.gate,
          p.times_ratio,
          static_cast<int>(p.pair.numerator),
          static_cast<int>(p.pair.denominator),
          narrow(p.coefficient),
          narrow(p.gradient ? p.coefficient * toward_pi : 0.0)};
}

void plan_ratio(const LossSpec& spec, LossPlan& plan) {
  plan.uses_ratio = uses_ratio_of(spec);
  plan.token_ratio = spec.ratio.level == Level::token;
  plan.geometric_ratio = spec.ratio.level == Level::geometric;
  plan.through_mean =
      plan.uses_ratio && !plan.token_ratio && spec.ratio.route == Route::through_mean;
  plan.ratio_over_all = spec.ratio.over == Positions::all;
  plan.clamps_log = spec.ratio.log_clamp < kInfinity || spec.ratio.log_cap < kInfinity;
  plan.is_mismatch_ratio = plan.uses_ratio && plan.token_ratio && !plan.clamps_log &&
                           spec.ratio.pair == Pair{Stream::pi, Stream::rollout};
  plan.clips_by_sign = spec.ratio.signed_log_clip.has_value();
  const Bounds by_sign = spec.ratio.signed_log_clip.value_or(Bounds{});
  plan.sign_clip_low = narrow(by_sign.low);
  plan.sign_clip_high = narrow(by_sign.high);
  plan.ratio_num = static_cast<int>(spec.ratio.pair.numerator);
  plan.ratio_den = static_cast<int>(spec.ratio.pair.denominator);
  plan.log_clamp = narrow(spec.ratio.log_clamp);
  plan.log_cap = narrow(spec.ratio.log_cap);
}

void plan_surrogate(const LossSpec& spec, LossPlan& plan) {
  plan.kind = spec.surrogate.kind;
  plan.by_ratio_alone =
      plan.kind != SurrogateKind::log_prob && plan.kind != SurrogateKind::detached_ratio;
  plan.clip_low = narrow(spec.surrogate.clip.low);
  plan.clip_high = narrow(spec.surrogate.clip.high);
  plan.dual_clip = narrow(spec.surrogate.dual_clip);
  plan.ratio_cap = narrow(spec.surrogate.ratio_cap);
  plan.tau_pos = narrow(spec.surrogate.tau_pos);
  plan.tau_neg = narrow(spec.surrogate.tau_neg);
  plan.has_clip = has_clip(spec);
}

void plan_shaping(const LossSpec& spec, LossPlan& plan) {
  plan.adv_tau = narrow(spec.shaping.adv_tau);
  plan.teacher_tau = narrow(spec.shaping.teacher_tau);
  plan.teacher = static_cast<int>(spec.shaping.teacher);
  plan.sequence_mean = spec.shaping.sequence_mean;
  plan.constant_one = spec.shaping.constant_one;
  plan.times_mask = spec.shaping.times_mask;
}

void plan_lists(const LossSpec& spec, LossPlan& plan) {
  for (const Gate& gate : spec.gates) {
    if (!drops_by_token(gate)) continue;
    LEEWAY_CHECK(plan.token_gates < kMaxGates, "at most six token-level gates");
    plan.gates[plan.token_gates++] = plan_gate(spec, gate);
  }
  plan.gate_count = plan.token_gates;
  for (const Gate& gate : spec.gates) {
    if (drops_by_token(gate) || plan.gate_count == kMaxGates) continue;
    plan.gates[plan.gate_count++] = plan_gate(spec, gate);
  }
  for (const Correction& correction : spec.corrections) {
    if (!correction.weight || plan.weight_count == kMaxWeights) continue;
    plan.weights[plan.weight_count++] = plan_weight(*correction.weight);
  }
  for (const Penalty& p : spec.penalties) {
    LEEWAY_CHECK(plan.penalty_count < kMaxPenalties, "at most four penalties");
    plan.penalties[plan.penalty_count++] = plan_penalty(p);
  }
}

void plan_reduction(const LossSpec& spec, LossPlan& plan) {
  plan.reduction = spec.reduction.kind;
  plan.kept_denominator = spec.reduction.denominator == Denominator::kept;
  plan.count_empty = spec.reduction.count_empty;
  plan.fixed_length = spec.reduction.fixed_length;
  plan.positions_all = spec.positions == Positions::all;
  plan.normalisation = spec.weight_normalisation;
  plan.m2_threshold = spec.m2_threshold.value_or(-1.0);
  plan.covariance_ratio = spec.covariance_selection ? spec.covariance_selection->ratio : -1.0;
  plan.token_level = one_pass(spec);
}

// Why a spec cannot be computed from a plan alone; empty if it can.
std::string why_incomplete(const LossSpec& spec) {
  struct List {
    const char* what;
    size_t count;
    int most;
  };
  for (const List& list : {List{"gates", spec.gates.size(), kMaxGates},
                           List{"corrections", spec.corrections.size(), kMaxWeights},
                           List{"penalties", spec.penalties.size(), kMaxPenalties}}) {
    if (list.count <= static_cast<size_t>(list.most)) continue;
    return fmt::format("has {} {}, CUDA computes at most {}", list.count, list.what, list.most);
  }
  for (const Correction& correction : spec.corrections) {
    if (correction.weight) continue;
    return fmt::format("its correction {} is a function of the host", correction.name);
  }
  return "";
}

}  // namespace

LossPlan make_loss_plan(const LossSpec& spec) {
  LossPlan plan{};
  plan_ratio(spec, plan);
  plan_surrogate(spec, plan);
  plan_shaping(spec, plan);
  plan_lists(spec, plan);
  plan_reduction(spec, plan);
  plan.plain = plan.penalty_count == 0 && plan.teacher_tau == 0.0f && plan.adv_tau == 1.0f &&
               !plan.sequence_mean && !plan.constant_one && !plan.times_mask && !plan.clamps_log &&
               plan.token_ratio;
  for (int k = 0; k < kStreamCount; ++k) {
    if (spec.reads(static_cast<Stream>(k))) plan.reads |= 1u << k;
  }
  return plan;
}

bool has_complete_plan(const LossSpec& spec) { return why_incomplete(spec).empty(); }

LossPlan make_complete_plan(const LossSpec& spec) {
  const std::string problem = why_incomplete(spec);
  if (!problem.empty()) {
    throw Error(fmt::format("preset {}: {}; evaluate it on the CPU", spec.preset, problem));
  }
  return make_loss_plan(spec);
}

}  // namespace leeway
