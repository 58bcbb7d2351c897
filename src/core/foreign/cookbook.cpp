// Fireworks cookbook, main and PR 169: raw token sums, pi against prox, weights prox/rollout. Keys,
// defaults and what is refused are those of its dataclasses; the goldens' `log_clamp` is its fixed
// safety clamp, and their `log_cap` its seq_ratio_log_cap.

#include <cmath>

#include "core/foreign/foreign.h"

namespace leeway {
namespace {

constexpr double kSafetyClamp = 20.0;

double log_clamp_of(ForeignSettings& s) { return s.at_least("log_clamp", kSafetyClamp, 0.0); }

Weight capped(ForeignSettings& s, const char* cap_key, const char* level_key) {
  const double log_clamp = log_clamp_of(s);
  return {.level = s.one_of(level_key, "token", {"token", "sequence"}) == "sequence"
                       ? Level::geometric
                       : Level::token,
          .clamp = {0.0, s.number(cap_key, 5.0)},
          .log_clamp = log_clamp,
          .token_log_clamp = log_clamp};  // the source clamps before it averages
}

Surrogate clipped(double eps_low, double eps_high) {
  return {.kind = SurrogateKind::clipped, .clip = {1.0 - eps_low, 1.0 + eps_high}};
}

void add_detached_kl(LossSpec& spec, double beta) {
  if (beta == 0) return;
  spec.penalties.push_back({.kind = PenaltyKind::k1,
                            .pair = {Stream::pi, Stream::ref},
                            .coefficient = beta,
                            .gradient = false});
}

// A key whose None, "off" here, stands for another one's value.
double or_none(ForeignSettings& s, const char* key, double other, double least = -kInfinity) {
  return s.optional_number(key, other) ? s.at_least(key, other, least) : other;
}

// The clamp of losses that have a key for it.
double ratio_log_cap(ForeignSettings& s) {
  return s.at_least("ratio_log_cap", log_clamp_of(s), 0.0);
}

// The mean runs over all positions of the response, masked ones included.
Ratio gspo_ratio(ForeignSettings& s) {
  return {.pair = kPiProx,
          .level = Level::geometric,
          .log_cap = s.at_least("seq_ratio_log_cap", s.number("log_cap", 10.0), 0.0),
          .over = Positions::all};
}

}  // namespace

std::optional<LossSpec> cookbook_spec(std::string_view loss, ForeignSettings& s) {
  const auto eps = [&](const char* key, double fallback) { return s.at_least(key, fallback, 0.0); };
  LossSpec spec;
  spec.reduction.kind = ReductionKind::sum;
  spec.ratio = {.pair = kPiProx, .log_clamp = log_clamp_of(s)};
  if (loss == "reinforce") {
    spec.ratio.pair = kPiRollout;
    add_detached_kl(spec, s.at_least("kl_beta", 0.0, 0.0));
    return spec;
  }
  if (loss == "igpo") {
    const double band = eps("eps_clip", 0.2);
    spec.surrogate = clipped(band, band);
    add_detached_kl(spec, s.at_least("kl_beta", 1e-3, 0.0));
    spec.corrections.push_back(weight_correction("tis", {.log_clamp = spec.ratio.log_clamp}));
    return spec;
  }
  if (loss == "grpo") {
    const double band = eps("eps_clip", 0.2);
    spec.surrogate = clipped(band, or_none(s, "eps_clip_high", band, 0.0));
    const double beta = s.at_least("kl_beta", 1e-3, 0.0);
    if (beta != 0) {
      spec.penalties.push_back({.kind = PenaltyKind::k3, .pair = kRefPi, .coefficient = beta});
    }
  } else if (loss == "dapo") {
    spec.ratio.log_clamp = ratio_log_cap(s);
    spec.surrogate = clipped(eps("eps_clip", 0.2), eps("eps_clip_high", 0.28));
    spec.surrogate.dual_clip = s.optional_above("eps_clip_c", 1.0).value_or(kInfinity);
  } else if (loss == "gspo") {
    spec.ratio = gspo_ratio(s);
    spec.surrogate = clipped(eps("clip_ratio_low", 0.2), eps("clip_ratio_high", 0.2));
  } else if (loss == "cispo") {
    spec.ratio.log_clamp = ratio_log_cap(s);
    spec.surrogate = clipped(eps("eps_low", 0.2), eps("eps_high", 0.28));
    spec.surrogate.kind = SurrogateKind::detached_ratio;
  } else if (loss == "dro") {
    // The quadratic term is switched off at A = 0, and the weight is on the linear term alone.
    spec.ratio = {.pair = kPiProx};
    spec.surrogate.kind = SurrogateKind::log_prob;
    spec.penalties.push_back({.kind = PenaltyKind::k2,
                              .pair = kPiProx,
                              .coefficient = s.at_least("beta", 0.05, 0.0),
                              .gate = PenaltyGate::nonzero_advantage});
  } else if (loss == "is") {
    spec.ratio.log_clamp = ratio_log_cap(s);
    spec.surrogate.kind = SurrogateKind::ratio;
  } else {
    return std::nullopt;
  }
  s.at_least("cap", 5.0, 0.0);
  Weight weight = capped(s, "cap", "level");
  if (auto threshold = s.optional_number("icepop_threshold")) {
    if (weight.level != Level::token) s.refuse("icepop_threshold", "needs level = \"token\"");
    const double high = s.at_least("icepop_threshold", *threshold, 1.0);
    weight.keep = {1.0 / high, high};
  }
  spec.corrections.push_back(weight_correction("tis", weight));
  return spec;
}

std::optional<LossSpec> cookbook_pr169_spec(std::string_view loss, ForeignSettings& s) {
  LossSpec spec;
  spec.positions = Positions::all;
  spec.reduction.kind = ReductionKind::sum;
  spec.ratio = {.pair = kPiProx, .log_clamp = log_clamp_of(s)};
  if (loss == "grpo") {
    const double band = s.number("eps_clip", 0.2);
    spec.surrogate = clipped(band, or_none(s, "eps_clip_high", band));
    add_detached_kl(spec, s.number("kl_beta", 1e-3));
  } else if (loss == "dapo") {
    spec.ratio.log_clamp = ratio_log_cap(s);
    spec.surrogate = clipped(s.number("eps_clip", 0.2), s.number("eps_clip_high", 0.28));
    spec.surrogate.dual_clip = s.optional_above("eps_clip_c", 1.0).value_or(kInfinity);
  } else if (loss == "gspo") {
    const double band = s.number("clip_ratio", 0.2);
    spec.ratio = gspo_ratio(s);
    spec.surrogate =
        clipped(or_none(s, "clip_ratio_low", band), or_none(s, "clip_ratio_high", band));
  } else if (loss == "cispo") {
    spec.ratio.log_clamp = ratio_log_cap(s);
    spec.surrogate.kind = SurrogateKind::ratio;
    spec.gates.push_back(
        {.quantity = Quantity::ratio,
         .pair = kPiProx,
         .keep = {1.0 - s.number("eps_low", 0.2), 1.0 + s.number("eps_high", 0.28)},
         .sign = SignRule::zero_is_kept,
         .log_clamp = spec.ratio.log_clamp});
  } else {
    return std::nullopt;
  }
  spec.corrections.push_back(weight_correction("tis", capped(s, "tis_cap", "tis_level")));
  return spec;
}

}  // namespace leeway
