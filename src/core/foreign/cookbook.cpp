// Fireworks cookbook, main and PR 169: raw token sums, pi against prox, weights prox/rollout.

#include <cmath>

#include "core/foreign/foreign.h"

namespace leeway {
namespace {

Weight capped(ForeignSettings& s, const char* cap_key, const char* level_key, double log_clamp) {
  const std::string level = s.text(level_key, "token");
  if (level != "token" && level != "sequence") s.refuse(level_key, "must be token or sequence");
  return {.level = level == "sequence" ? Level::geometric : Level::token,
          .clamp = {0.0, s.number(cap_key, 5.0)},
          .log_clamp = log_clamp,
          .token_log_clamp = log_clamp};  // the source clamps before it averages
}

Surrogate clipped(ForeignSettings& s, const char* low, const char* high, double eps_low,
                  double eps_high) {
  const double lo = s.number(low, eps_low);
  return {.kind = SurrogateKind::clipped, .clip = {1.0 - lo, 1.0 + s.number(high, eps_high)}};
}

void add_detached_kl(LossSpec& spec, ForeignSettings& s, double kl_beta) {
  const double beta = s.number("kl_beta", kl_beta);
  if (beta == 0) return;
  spec.penalties.push_back({.kind = PenaltyKind::k1,
                            .pair = {Stream::pi, Stream::ref},
                            .coefficient = beta,
                            .gradient = false});
}

void set_gspo_ratio(LossSpec& spec, ForeignSettings& s) {
  spec.ratio = {.pair = kPiProx,
                .level = Level::geometric,
                .log_cap = s.number("log_cap", 10.0),
                .over = Positions::all};
}

}  // namespace

std::optional<LossSpec> cookbook_spec(std::string_view loss, ForeignSettings& s) {
  LossSpec spec;
  const double log_clamp = s.number("log_clamp", 20.0);
  spec.reduction.kind = ReductionKind::sum;
  spec.ratio = {.pair = kPiProx, .log_clamp = log_clamp};
  if (loss == "reinforce") {
    spec.ratio.pair = kPiRollout;
    add_detached_kl(spec, s, 1e-3);
    return spec;
  }
  if (loss == "igpo") {
    const double eps = s.number("eps_clip", 0.2);
    spec.surrogate = {.kind = SurrogateKind::clipped, .clip = {1.0 - eps, 1.0 + eps}};
    add_detached_kl(spec, s, 1e-3);
    spec.corrections.push_back(weight_correction("tis", {.log_clamp = log_clamp}));
    return spec;
  }
  if (loss == "grpo") {
    spec.surrogate = clipped(s, "eps_clip", "eps_clip_high", 0.2, s.number("eps_clip", 0.2));
    const double beta = s.number("kl_beta", 1e-3);
    if (beta != 0) {
      spec.penalties.push_back({.kind = PenaltyKind::k3, .pair = kRefPi, .coefficient = beta});
    }
  } else if (loss == "dapo") {
    spec.surrogate = clipped(s, "eps_clip", "eps_clip_high", 0.2, 0.28);
    spec.surrogate.dual_clip = s.optional_number("eps_clip_c").value_or(kInfinity);
  } else if (loss == "gspo") {
    set_gspo_ratio(spec, s);  // its mean runs over masked positions too
    spec.surrogate = clipped(s, "clip_ratio_low", "clip_ratio_high", 0.2, 0.2);
  } else if (loss == "cispo") {
    spec.surrogate = clipped(s, "eps_low", "eps_high", 0.2, 0.28);
    spec.surrogate.kind = SurrogateKind::detached_ratio;
  } else if (loss == "dro") {
    // The quadratic term is switched off at A = 0, and the weight is on the linear term alone.
    spec.ratio = {.pair = kPiProx};
    spec.surrogate.kind = SurrogateKind::log_prob;
    spec.penalties.push_back({.kind = PenaltyKind::k2,
                              .pair = kPiProx,
                              .coefficient = s.number("beta", 0.05),
                              .gate = PenaltyGate::nonzero_advantage});
  } else if (loss == "is") {
    spec.surrogate.kind = SurrogateKind::ratio;
  } else {
    return std::nullopt;
  }
  Weight weight = capped(s, "cap", "level", log_clamp);
  if (auto threshold = s.optional_number("icepop_threshold")) {
    if (weight.level != Level::token) s.refuse("icepop_threshold", "needs level = \"token\"");
    weight.keep = {1.0 / *threshold, *threshold};
  }
  spec.corrections.push_back(weight_correction("tis", weight));
  return spec;
}

std::optional<LossSpec> cookbook_pr169_spec(std::string_view loss, ForeignSettings& s) {
  LossSpec spec;
  const double log_clamp = s.number("log_clamp", 20.0);
  spec.positions = Positions::all;
  spec.reduction.kind = ReductionKind::sum;
  spec.ratio = {.pair = kPiProx, .log_clamp = log_clamp};
  if (loss == "grpo") {
    spec.surrogate = clipped(s, "eps_clip", "eps_clip_high", 0.2, s.number("eps_clip", 0.2));
    add_detached_kl(spec, s, 1e-3);
  } else if (loss == "dapo") {
    spec.surrogate = clipped(s, "eps_clip", "eps_clip_high", 0.2, 0.28);
    spec.surrogate.dual_clip = s.optional_number("eps_clip_c", 1.5).value_or(kInfinity);
  } else if (loss == "gspo") {
    set_gspo_ratio(spec, s);
    spec.surrogate = clipped(s, "clip_ratio_low", "clip_ratio_high", 0.2, 0.2);
  } else if (loss == "cispo") {
    spec.surrogate.kind = SurrogateKind::ratio;
    spec.gates.push_back(
        {.quantity = Quantity::ratio,
         .pair = kPiProx,
         .keep = {1.0 - s.number("eps_low", 0.2), 1.0 + s.number("eps_high", 0.28)},
         .sign = SignRule::zero_is_kept,
         .log_clamp = log_clamp});
  } else {
    return std::nullopt;
  }
  spec.corrections.push_back(
      weight_correction("tis", capped(s, "tis_cap", "tis_level", log_clamp)));
  return spec;
}

}  // namespace leeway
