#include "core/cuda/loss_plan.h"

#include <fmt/format.h>

#include "core/cpu/policy_head.h"
#include "core/participation.h"
#include "leeway/error.h"

namespace leeway::cuda {
namespace {

float narrow(double value) { return static_cast<float>(value); }

void check_count(const LossSpec& spec, const char* what, size_t count, int most) {
  if (count <= static_cast<size_t>(most)) return;
  throw Error(fmt::format("preset {}: has {} {}, CUDA computes at most {}; evaluate it on the CPU",
                          spec.preset, count, what, most));
}

}  // namespace

LossPlan make_loss_plan(const LossSpec& spec) {
  LossPlan plan{};
  plan.uses_ratio = uses_ratio_of(spec);
  plan.token_ratio = spec.ratio.level == Level::token;
  plan.geometric_ratio = spec.ratio.level == Level::geometric;
  plan.through_mean =
      plan.uses_ratio && !plan.token_ratio && spec.ratio.route == Route::through_mean;
  plan.ratio_over_all = spec.ratio.over == Positions::all;
  plan.clips_by_sign = spec.ratio.signed_log_clip.has_value();
  const Bounds by_sign = spec.ratio.signed_log_clip.value_or(Bounds{});
  plan.sign_clip_low = narrow(by_sign.low);
  plan.sign_clip_high = narrow(by_sign.high);
  plan.ratio_num = static_cast<int>(spec.ratio.pair.numerator);
  plan.ratio_den = static_cast<int>(spec.ratio.pair.denominator);
  plan.log_clamp = narrow(spec.ratio.log_clamp);
  plan.log_cap = narrow(spec.ratio.log_cap);

  plan.kind = spec.surrogate.kind;
  plan.by_ratio_alone =
      plan.kind != SurrogateKind::log_prob && plan.kind != SurrogateKind::detached_ratio;
  plan.clip_low = narrow(spec.surrogate.clip.low);
  plan.clip_high = narrow(spec.surrogate.clip.high);
  plan.dual_clip = narrow(spec.surrogate.dual_clip);
  plan.ratio_cap = narrow(spec.surrogate.ratio_cap);
  plan.tau_pos = narrow(spec.surrogate.tau_pos);
  plan.tau_neg = narrow(spec.surrogate.tau_neg);

  plan.adv_tau = narrow(spec.shaping.adv_tau);
  plan.teacher_tau = narrow(spec.shaping.teacher_tau);
  plan.teacher = static_cast<int>(spec.shaping.teacher);
  plan.sequence_mean = spec.shaping.sequence_mean;
  plan.constant_one = spec.shaping.constant_one;
  plan.times_mask = spec.shaping.times_mask;

  check_count(spec, "gates", spec.gates.size(), kMaxGates);
  for (const Gate& gate : spec.gates) {
    plan.gates[plan.gate_count++] = {gate.quantity,
                                     gate.level,
                                     gate.sign,
                                     gate.scope,
                                     static_cast<int>(gate.pair.numerator),
                                     static_cast<int>(gate.pair.denominator),
                                     narrow(gate.keep.low),
                                     narrow(gate.keep.high),
                                     narrow(gate.log_clamp)};
  }
  check_count(spec, "corrections", spec.corrections.size(), kMaxWeights);
  for (const Correction& correction : spec.corrections) {
    if (!correction.weight) {
      throw Error(fmt::format(
          "preset {}: its correction {} is a function of the host; evaluate it on the CPU",
          spec.preset, correction.name));
    }
    const Weight& w = *correction.weight;
    plan.weights[plan.weight_count++] = {w.level,
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
  check_count(spec, "penalties", spec.penalties.size(), kMaxPenalties);
  for (const Penalty& p : spec.penalties) plan.penalties[plan.penalty_count++] = plan_penalty(p);

  plan.reduction = spec.reduction.kind;
  plan.kept_denominator = spec.reduction.denominator == Denominator::kept;
  plan.count_empty = spec.reduction.count_empty;
  plan.fixed_length = spec.reduction.fixed_length;
  plan.positions_all = spec.positions == Positions::all;
  plan.has_clip = has_clip(spec);
  plan.normalisation = spec.weight_normalisation;
  plan.m2_threshold = spec.m2_threshold.value_or(-1.0);
  plan.covariance_ratio = spec.covariance_selection ? spec.covariance_selection->ratio : -1.0;
  plan.token_level = one_pass(spec);
  for (int k = 0; k < kStreamCount; ++k) {
    if (spec.reads(static_cast<Stream>(k))) plan.reads |= 1u << k;
  }
  return plan;
}

}  // namespace leeway::cuda
