// prime-rl: two policies, pi against rollout; sums over the trained tokens of the batch. Its
// configuration refuses negative numbers everywhere.

#include "core/foreign/foreign.h"

namespace leeway {
namespace {

LossSpec gated(const Gate& gate) {
  LossSpec spec;
  spec.ratio.pair = kPiRollout;
  spec.surrogate.kind = SurrogateKind::ratio;
  spec.gates.push_back(gate);
  return spec;
}

void add_kl(LossSpec& spec, double kl_tau, PenaltyGate gate) {
  if (kl_tau == 0) return;
  spec.penalties.push_back(
      {.kind = PenaltyKind::squared_log, .pair = kPiRollout, .coefficient = kl_tau, .gate = gate});
}

void shape(LossSpec& spec, ForeignSettings& s, bool teacher) {
  spec.shaping.adv_tau = s.at_least("adv_tau", 1.0, 0.0);
  if (!teacher) return;
  spec.shaping.teacher_tau = s.at_least("teacher_tau", 0.0, 0.0);
}

}  // namespace

std::optional<LossSpec> prime_spec(std::string_view loss, ForeignSettings& s) {
  LossSpec spec;
  const bool tight = loss.ends_with("_tight");
  const double band_low = tight ? 0.5 : 0.2, band_high = tight ? 2.0 : 5.0;
  if (loss == "default_dppo_kl") {
    // A <= 0 takes the low branch; the penalty is paid on dropped tokens too.
    spec = gated(
        {.quantity = Quantity::difference,
         .pair = kPiRollout,
         .keep = {-s.at_least("dppo_mask_low", 0.2, 0.0), s.at_least("dppo_mask_high", 0.2, 0.0)},
         .sign = SignRule::zero_takes_low});
    shape(spec, s, false);
    add_kl(spec, s.at_least("kl_tau", 1e-3, 0.0), PenaltyGate::all);
  } else if (loss == "ipo") {
    const double threshold = s.at_least("ipo_threshold", 0.1, 0.0);
    spec = gated(
        {.quantity = Quantity::difference, .pair = kPiRollout, .keep = {-threshold, threshold}});
    shape(spec, s, false);
    add_kl(spec, s.at_least("kl_tau", 1e-3, 0.0), PenaltyGate::all);
  } else if (loss == "PR2401_icepop" || loss == "PR2401_icepop_tight") {
    spec = gated({.quantity = Quantity::ratio,
                  .pair = kPiRollout,
                  .keep = {s.at_least("icepop_ratio_low", band_low, 0.0),
                           s.at_least("icepop_ratio_high", band_high, 0.0)}});
    shape(spec, s, true);
  } else if (loss == "PR2401_first_rollout_min") {
    spec = gated({.quantity = Quantity::ratio,
                  .pair = kPiRollout,
                  .keep = {s.at_least("icepop_ratio_low", 0.5, 0.0),
                           s.at_least("icepop_ratio_high", 5.0, 0.0)}});
    spec.gates.push_back({.quantity = Quantity::ratio,
                          .pair = kPiRollout,
                          .level = Level::min,
                          .keep = {s.at_least("icepop_rollout_min_ratio", 1e-5, 0.0), kInfinity}});
    shape(spec, s, true);
  } else if (loss == "PR2423_ipo_kl_kept" || loss == "PR2423_ipo_kl_kept_tight") {
    // The keys kept their old names and became ratio bounds.
    spec = gated({.quantity = Quantity::ratio,
                  .pair = kPiRollout,
                  .keep = {s.at_least("dppo_mask_low", band_low, 0.0),
                           s.at_least("dppo_mask_high", band_high, 0.0)},
                  .scope = GateScope::policy_and_penalty});
    shape(spec, s, true);
    add_kl(spec, s.at_least("kl_tau", 1e-3, 0.0), PenaltyGate::kept);
  } else if (loss == "PR2434_dppo_tv_sym" || loss == "PR2434_teacher") {
    spec = gated(
        {.quantity = Quantity::difference,
         .pair = kPiRollout,
         .keep = {-s.at_least("dppo_diff_low", 0.2, 0.0), s.at_least("dppo_diff_high", 0.2, 0.0)}});
    shape(spec, s, true);
  } else if (loss == "ref_kl") {
    // The advantage is stop(log teacher - log pi); one-sided gate.
    spec = gated({.quantity = Quantity::difference,
                  .pair = kPiRollout,
                  .keep = {-s.number("diff_low", 0.2), kInfinity}});
    spec.shaping = {
        .adv_tau = 0.0,
        .teacher_tau = 1.0,
        .teacher = s.text("reference", "teacher") == "ref" ? Stream::ref : Stream::teacher};
    add_kl(spec, s.at_least("kl_tau", 1e-3, 0.0), PenaltyGate::all);
  } else if (loss == "ce") {
    spec.surrogate.kind = SurrogateKind::log_prob;
    spec.shaping.constant_one = true;
  } else {
    return std::nullopt;
  }
  return spec;
}

}  // namespace leeway
