#include "core/cpu/token_plan.h"

#include "core/participation.h"
#include "leeway/error.h"

namespace leeway {

TokenPlan::TokenPlan(const LossSpec& spec, const TokenInputs& in) {
  auto f = [](double value) { return static_cast<float>(value); };
  auto has = [&](Stream s) { return in.streams[static_cast<int>(s)] != nullptr; };
  uses_ratio = uses_ratio_of(spec);
  token_ratio = spec.ratio.level == Level::token;
  clamps_log = spec.ratio.log_clamp < kInfinity || spec.ratio.log_cap < kInfinity;
  is_mismatch_ratio = uses_ratio && token_ratio && !clamps_log &&
                      spec.ratio.pair == Pair{Stream::pi, Stream::rollout};
  has_clip = leeway::has_clip(spec);
  has_rollout = has(Stream::rollout);
  has_ref = has(Stream::ref);
  has_teacher = has(Stream::teacher);
  ratio_den = static_cast<int>(spec.ratio.pair.denominator);
  log_clamp = f(spec.ratio.log_clamp);
  log_cap = f(spec.ratio.log_cap);
  kind = spec.surrogate.kind;
  clip_low = f(spec.surrogate.clip.low);
  clip_high = f(spec.surrogate.clip.high);
  dual_clip = f(spec.surrogate.dual_clip);
  ratio_cap = f(spec.surrogate.ratio_cap);
  tau_pos = f(spec.surrogate.tau_pos);
  tau_neg = f(spec.surrogate.tau_neg);
  by_ratio_alone = kind != SurrogateKind::log_prob && kind != SurrogateKind::detached_ratio;
  adv_tau = f(spec.shaping.adv_tau);
  teacher_tau = f(spec.shaping.teacher_tau);
  teacher = static_cast<int>(spec.shaping.teacher);
  sequence_mean = spec.shaping.sequence_mean;
  constant_one = spec.shaping.constant_one;
  times_mask = spec.shaping.times_mask && in.loss_mask != nullptr;
  for (const Gate& gate : spec.gates) {
    if (gate.level != Level::token || gate.scope == GateScope::mask || in.gates_in_flags) continue;
    LEEWAY_CHECK(gate_count < kMaxGates, "at most four token-level gates");
    const bool same_ratio = uses_ratio && token_ratio && gate.pair == spec.ratio.pair &&
                            gate.log_clamp == spec.ratio.log_clamp &&
                            spec.ratio.log_cap == kInfinity;
    const bool from_ratio = gate.quantity == Quantity::ratio || gate.quantity == Quantity::k3 ||
                            gate.quantity == Quantity::binary_kl;
    gates[gate_count++] = {gate.quantity,
                           gate.sign,
                           same_ratio && gate.quantity == Quantity::ratio,
                           same_ratio && from_ratio,
                           from_ratio,
                           gate.scope == GateScope::policy_and_penalty,
                           static_cast<int>(gate.pair.numerator),
                           static_cast<int>(gate.pair.denominator),
                           f(gate.keep.low),
                           f(gate.keep.high),
                           f(gate.log_clamp)};
  }
  for (const Penalty& p : spec.penalties) {
    LEEWAY_CHECK(penalty_count < kMaxPenalties, "at most four penalties");
    penalties[penalty_count++] = plan_penalty(p);
  }
  simple = in.batch_weights == nullptr && in.weights == nullptr && in.flags == nullptr &&
           in.through == nullptr && penalty_count == 0 && teacher_tau == 0.0f && adv_tau == 1.0f &&
           !sequence_mean && !constant_one && !times_mask && !clamps_log && token_ratio;
}

}  // namespace leeway
