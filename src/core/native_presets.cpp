// Every native preset: its keys with defaults, and its point in the algebra.

#include "core/native_presets.h"

#include <fmt/format.h>

namespace leeway {
namespace {

constexpr Pair kPiRollout{Stream::pi, Stream::rollout};
constexpr Pair kPiProx{Stream::pi, Stream::prox};
constexpr Pair kProxRollout{Stream::prox, Stream::rollout};
constexpr Bounds kNonNegative{0.0, kInfinity};

KeyInfo number(std::string name, std::string value, std::string meaning,
               Bounds range = kNonNegative, bool open_low = false) {
  return {
      std::move(name), KeyType::number, std::move(value), std::move(meaning), range, open_low, {}};
}
KeyInfo number_or_off(std::string name, std::string value, std::string meaning, Bounds range,
                      bool open_low) {
  return {std::move(name),
          KeyType::number_or_off,
          std::move(value),
          std::move(meaning),
          range,
          open_low,
          {}};
}
KeyInfo choice(std::string name, std::vector<std::string> choices, std::string meaning) {
  std::string first = choices.front();
  return {std::move(name), KeyType::choice,   std::move(first), std::move(meaning), {},
          false,           std::move(choices)};
}

KeyInfo anchor(std::vector<std::string> choices = {"prox", "rollout"}) {
  return choice("anchor", std::move(choices), "what the ratio is taken against");
}
KeyInfo eps_low(std::string value = "0.2") {
  return number("eps_low", std::move(value), "clip band reaches this far below one", {0.0, 1.0});
}
KeyInfo eps_high(std::string value = "0.2") {
  return number("eps_high", std::move(value), "clip band reaches this far above one");
}
KeyInfo dual_clip() {
  return number_or_off("dual_clip", "off", "at advantage < 0 the loss is at most this times |A|",
                       {1.0, kInfinity}, true);
}

Pair anchored(const KeyValues& v) { return v.text("anchor") == "rollout" ? kPiRollout : kPiProx; }

Bounds eps_band(const KeyValues& v, const char* low = "eps_low", const char* high = "eps_high") {
  return {1.0 - v.number(low), 1.0 + v.number(high)};
}

// An interval given by two absolute keys; refuses an empty one and one that covers everything.
Bounds interval(const KeyValues& v, const char* low, const char* high) {
  const Bounds bounds{v.number(low), v.number(high)};
  if (bounds.low > bounds.high) {
    v.refuse(v.given(low) ? low : high, fmt::format("{} must not exceed {}", low, high));
  }
  if (bounds.low <= 0 && bounds.high == kInfinity) {
    v.refuse(low, fmt::format("with {} = infinity nothing is ever outside: inert", high));
  }
  return bounds;
}

// Either absolute bounds or distances from one, never a mixture.
Bounds either_convention(const KeyValues& v, const std::string& prefix) {
  const std::string low = prefix + "ratio_low", high = prefix + "ratio_high";
  const std::string eps_lo = prefix + "eps_low", eps_hi = prefix + "eps_high";
  auto on = [&](const std::string& key) { return v.given(key) && v.number_or_off(key); };
  if (!on(eps_lo) && !on(eps_hi)) {
    for (const std::string& key : {low, high}) {
      if (!v.number_or_off(key)) {
        v.refuse(key, fmt::format("needs {} and {} in its place", eps_lo, eps_hi));
      }
    }
    return interval(v, low.c_str(), high.c_str());
  }
  const std::string& given_eps = on(eps_lo) ? eps_lo : eps_hi;
  if (on(low) || on(high)) {
    v.refuse(
        on(low) ? low : high,
        fmt::format("absolute bounds cannot be mixed with {}, a distance from one", given_eps));
  }
  if (!on(eps_lo) || !on(eps_hi)) {
    v.refuse(given_eps, fmt::format("{} and {} come together: give both", eps_lo, eps_hi));
  }
  return {1.0 - *v.number_or_off(eps_lo), 1.0 + *v.number_or_off(eps_hi)};
}

std::vector<KeyInfo> either_convention_keys(const std::string& prefix, const std::string& high) {
  return {number_or_off(prefix + "ratio_low", "0", "absolute lower bound of the ratio",
                        kNonNegative, false),
          number_or_off(prefix + "ratio_high", high, "absolute upper bound of the ratio",
                        kNonNegative, true),
          number_or_off(prefix + "eps_low", "off", "lower bound as a distance from one", {0.0, 1.0},
                        false),
          number_or_off(prefix + "eps_high", "off", "upper bound as a distance from one",
                        kNonNegative, false)};
}

LossSpec importance_sampled() {
  LossSpec spec;
  spec.ratio.pair = kPiRollout;
  spec.surrogate.kind = SurrogateKind::ratio;
  return spec;
}

LossSpec gated(const Gate& gate) {
  LossSpec spec = importance_sampled();
  spec.gates.push_back(gate);
  return spec;
}

LossSpec clipped(const KeyValues& v, Pair pair) {
  LossSpec spec;
  spec.ratio.pair = pair;
  spec.surrogate.kind = SurrogateKind::clipped;
  spec.surrogate.clip = eps_band(v);
  spec.surrogate.dual_clip = v.number_or_off("dual_clip").value_or(kInfinity);
  return spec;
}

LossSpec build_icepop(const KeyValues& v) {
  LossSpec spec = gated({.quantity = Quantity::ratio,
                         .pair = kPiRollout,
                         .keep = interval(v, "icepop_ratio_low", "icepop_ratio_high")});
  if (auto floor = v.number_or_off("icepop_rollout_min_ratio")) {
    spec.gates.push_back({.quantity = Quantity::ratio,
                          .pair = kPiRollout,
                          .level = Level::min,
                          .keep = {*floor, kInfinity}});
  }
  return spec;
}

LossSpec build_ipo_kl(const KeyValues& v) {
  LossSpec spec = gated({.quantity = Quantity::ratio,
                         .pair = kPiRollout,
                         .keep = interval(v, "ipo_ratio_low", "ipo_ratio_high"),
                         .scope = GateScope::policy_and_penalty});
  if (v.number("kl_tau") > 0) {
    spec.penalties.push_back({.kind = PenaltyKind::squared_log,
                              .pair = kPiRollout,
                              .coefficient = v.number("kl_tau"),
                              .gate = PenaltyGate::kept});
  }
  return spec;
}

LossSpec build_dppo(const KeyValues& v, SignRule sign) {
  if (v.number("dppo_diff_low") >= 1 && v.number("dppo_diff_high") >= 1) {
    v.refuse("dppo_diff_low", "inert: no two probabilities differ by more than 1");
  }
  return gated({.quantity = Quantity::difference,
                .pair = kPiRollout,
                .keep = {-v.number("dppo_diff_low"), v.number("dppo_diff_high")},
                .sign = sign});
}

LossSpec build_dppo_kl(const KeyValues& v) {
  LossSpec spec = build_dppo(v, SignRule::zero_takes_low);
  if (v.number("kl_tau") > 0) {
    spec.penalties.push_back(
        {.kind = PenaltyKind::squared_log, .pair = kPiRollout, .coefficient = v.number("kl_tau")});
  }
  return spec;
}

LossSpec build_gspo(const KeyValues& v) {
  LossSpec spec;
  spec.ratio = {
      .pair = anchored(v),
      .level = Level::geometric,
      .route = v.text("gradient") == "through_mean" ? Route::through_mean : Route::straight_through,
      .log_cap = v.number("log_cap")};
  spec.surrogate = {.kind = SurrogateKind::clipped, .clip = eps_band(v)};
  return spec;
}

LossSpec build_grpo(const KeyValues& v) {
  LossSpec spec = clipped(v, anchored(v));
  if (v.number("ref_kl") > 0) {
    spec.penalties.push_back({.kind = PenaltyKind::k3,
                              .pair = {Stream::ref, Stream::pi},
                              .coefficient = v.number("ref_kl")});
  }
  return spec;
}

LossSpec build_cispo(const KeyValues& v) {
  LossSpec spec;
  spec.ratio.pair = anchored(v);
  spec.surrogate = {.kind = SurrogateKind::detached_ratio, .clip = either_convention(v, "")};
  return spec;
}

LossSpec build_cispo_mask(const KeyValues& v) {
  LossSpec spec = gated({.quantity = Quantity::ratio,
                         .pair = kPiProx,
                         .keep = eps_band(v),
                         .sign = SignRule::zero_is_kept});
  spec.ratio.pair = kPiProx;
  return spec;
}

LossSpec build_dro(const KeyValues& v) {
  LossSpec spec;
  spec.ratio.pair = anchored(v);
  spec.surrogate.kind = SurrogateKind::log_prob;
  spec.penalties.push_back(
      {.kind = PenaltyKind::k2, .pair = anchored(v), .coefficient = v.number("dro_beta")});
  return spec;
}

LossSpec build_sapo(const KeyValues& v) {
  LossSpec spec;
  spec.ratio.pair = anchored(v);
  spec.surrogate = {.kind = SurrogateKind::soft_gate,
                    .tau_pos = v.number("tau_pos"),
                    .tau_neg = v.number("tau_neg")};
  return spec;
}

LossSpec build_m2po(const KeyValues& v) {
  LossSpec spec = clipped(v, kPiProx);
  spec.m2_threshold = v.number("m2_threshold");
  return spec;
}

}  // namespace

std::deque<PresetInfo> native_presets() {
  const std::vector<KeyInfo> ppo_keys = {eps_low(), eps_high(), dual_clip(), anchor()};
  std::vector<KeyInfo> grpo_keys = ppo_keys;
  grpo_keys.push_back(number("ref_kl", "0", "coefficient of k3(log ref - log pi), with gradient"));
  std::vector<KeyInfo> cispo_keys = either_convention_keys("", "5.0");
  cispo_keys.push_back(anchor({"rollout", "prox"}));
  const KeyInfo kl_tau = number("kl_tau", "1e-3", "coefficient of (log pi - log rollout)^2");
  const std::vector<KeyInfo> diff_keys = {
      number("dppo_diff_low", "0.2", "pi - rollout may fall this far", {0.0, 1.0}),
      number("dppo_diff_high", "0.2", "pi - rollout may rise this far", {0.0, 1.0})};
  std::vector<KeyInfo> dppo_kl_keys = diff_keys;
  dppo_kl_keys.push_back(kl_tau);

  return {
      {"icepop",
       "prime-rl PR 2401, INTELLECT-3",
       "-A pi/rollout on tokens whose ratio lies in a band; the rest is dropped",
       {number("icepop_ratio_low", "0.2", "smallest kept pi/rollout"),
        number("icepop_ratio_high", "5.0", "largest kept pi/rollout", kNonNegative, true),
        number_or_off("icepop_rollout_min_ratio", "off",
                      "a sequence with a token below this pi/rollout is dropped whole",
                      kNonNegative, true)},
       build_icepop},
      {"ipo_kl",
       "prime-rl PR 2423",
       "icepop's band, and (log pi/rollout)^2 paid on kept tokens only",
       {number("ipo_ratio_low", "0.2", "smallest kept pi/rollout"),
        number("ipo_ratio_high", "5.0", "largest kept pi/rollout", kNonNegative, true), kl_tau},
       build_ipo_kl},
      {"dppo_tv", "prime-rl PR 2434, DPPO",
       "-A pi/rollout on tokens whose probability moved little, whatever the advantage", diff_keys,
       [](const KeyValues& v) { return build_dppo(v, SignRule::both); }},
      {"dppo_kl", "prime-rl's default before them, DPPO and Kimi K2.5",
       "the probability bound by advantage sign; (log pi/rollout)^2 on every trained token",
       dppo_kl_keys, build_dppo_kl},
      {"reinforce",
       "Williams 1992",
       "-A log pi, uncorrected",
       {},
       [](const KeyValues&) {
         LossSpec spec;
         spec.surrogate.kind = SurrogateKind::log_prob;
         return spec;
       }},
      {"is",
       "Tinker importance_sampling",
       "-A pi/rollout, unbounded",
       {number_or_off("log_clamp", "off", "|log ratio| is limited to this, without gradient beyond",
                      kNonNegative, true)},
       [](const KeyValues& v) {
         LossSpec spec = importance_sampled();
         spec.ratio.log_clamp = v.number_or_off("log_clamp").value_or(kInfinity);
         return spec;
       }},
      {"ppo", "Schulman 2017", "the clipped ratio", ppo_keys,
       [](const KeyValues& v) { return clipped(v, anchored(v)); }},
      {"grpo", "DeepSeekMath; slime, cookbook PR 169",
       "ppo with an optional k3 penalty against ref", grpo_keys, build_grpo},
      {"dapo",
       "DAPO; cookbook PR 169",
       "ppo with a wider upper clip",
       {eps_low(), eps_high("0.28"), dual_clip(), anchor()},
       [](const KeyValues& v) { return clipped(v, anchored(v)); }},
      {"gspo",
       "Qwen GSPO; cookbook PR 169",
       "ppo on the sequence's geometric mean ratio",
       {eps_low(), eps_high(),
        number("log_cap", "10", "upper limit of the mean log ratio, without gradient beyond",
               kNonNegative, true),
        choice("gradient", {"straight_through", "through_mean"},
               "to each token as if the ratio were its own, or shared through the mean"),
        anchor()},
       build_gspo},
      {"cispo", "MiniMax-M1; slime PR 2084 on a REINFORCE base",
       "-A stop(clamp(ratio)) log pi: the bounded ratio is a weight, every token keeps its "
       "gradient",
       cispo_keys, build_cispo},
      {"cispo_mask",
       "cookbook PR 169",
       "-A ratio, dropped above the band at A > 0 and below it at A < 0",
       {eps_low(), eps_high("0.28"), anchor({"prox"})},
       build_cispo_mask},
      {"dro",
       "DRO; Tinker, verl",
       "-A log pi + beta/2 (log pi/anchor)^2 on every trained token",
       {number("dro_beta", "0.05", "strength of the quadratic penalty", kNonNegative, true),
        anchor()},
       build_dro},
      {"sapo",
       "SAPO; verl, AReaL, TRL",
       "a sigmoid of the ratio instead of a clip",
       {number("tau_pos", "1.0", "steepness at advantage > 0", kNonNegative, true),
        number("tau_neg", "1.05", "steepness at advantage <= 0", kNonNegative, true), anchor()},
       build_sapo},
      {"kpop",
       "prime-rl's KPop",
       "is, tokens dropped by the binary KL of pi and rollout",
       {number("kpop_threshold", "0.1", "largest kept binary KL, the larger of both directions",
               kNonNegative, true)},
       [](const KeyValues& v) {
         return gated({.quantity = Quantity::binary_kl,
                       .pair = kPiRollout,
                       .keep = {-kInfinity, v.number("kpop_threshold")}});
       }},
      {"geo_mask",
       "prime-rl Geo-Mask, SkyRL",
       "is, sequences dropped by their geometric mean ratio",
       {number("geo_ratio_low", "0.99", "smallest kept exp(mean log pi/rollout)"),
        number("geo_ratio_high", "1.01", "largest kept exp(mean log pi/rollout)", kNonNegative,
               true)},
       [](const KeyValues& v) {
         return gated({.quantity = Quantity::ratio,
                       .pair = kPiRollout,
                       .level = Level::geometric,
                       .keep = interval(v, "geo_ratio_low", "geo_ratio_high")});
       }},
      {"seq_mis",
       "prime-rl Seq-MIS, TRL",
       "is, sequences dropped by their product of ratios",
       {number("seq_ratio_high", "3.0", "largest kept exp(sum log pi/rollout)", kNonNegative,
               true)},
       [](const KeyValues& v) {
         if (v.number("seq_ratio_high") == kInfinity)
           v.refuse("seq_ratio_high", "inert: it drops nothing");
         return gated({.quantity = Quantity::ratio,
                       .pair = kPiRollout,
                       .level = Level::sequence,
                       .keep = {-kInfinity, v.number("seq_ratio_high")}});
       }},
      {"m2po",
       "M2PO; AReaL",
       "ppo without the tokens of largest (log rollout/prox)^2, until the rest's mean is below a "
       "threshold",
       {number("m2_threshold", "0.04", "the mean of what stays is below this", kNonNegative, true),
        eps_low(), eps_high(), dual_clip()},
       build_m2po},
  };
}

std::deque<CorrectionInfo> native_corrections() {
  return {
      {"tis",
       "cookbook PR 169, slime, verl",
       "times prox/rollout, capped",
       {number("tis_cap", "5.0", "largest weight", kNonNegative, true),
        choice("tis_level", {"token", "geometric", "sequence"},
               "each token's ratio, the sequence's mean or its product")},
       [](const KeyValues& v) {
         const std::string& level = v.text("tis_level");
         return weight_correction("tis", {.pair = kProxRollout,
                                          .level = level == "token"       ? Level::token
                                                   : level == "geometric" ? Level::geometric
                                                                          : Level::sequence,
                                          .clamp = {0.0, v.number("tis_cap")}});
       }},
      {"icepop_tis",
       "slime",
       "times prox/rollout, zero outside a band",
       {number("tis_ratio_low", "0.5", "smallest weight that is kept"),
        number("tis_ratio_high", "2.0", "largest weight that is kept", kNonNegative, true)},
       [](const KeyValues& v) {
         return weight_correction(
             "icepop_tis",
             {.pair = kProxRollout, .keep = interval(v, "tis_ratio_low", "tis_ratio_high")});
       }},
      {"off_policy_is", "slime PR 2084",
       "times stop(clamp(pi/rollout)): one weight for mismatch and staleness together",
       either_convention_keys("ois_", "2.0"),
       [](const KeyValues& v) {
         return weight_correction("off_policy_is",
                                  {.pair = kPiRollout, .clamp = either_convention(v, "ois_")});
       }},
  };
}

std::span<const KeyInfo> Catalog::common_keys() {
  static const std::vector<KeyInfo> keys = {
      number("adv_tau", "1.0", "multiplies the advantage"),
      number("teacher_tau", "0.0", "adds this times stop(log teacher - log pi) to the advantage"),
      choice("reduction",
             {"token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "fixed_length", "sum"},
             "what the token losses are divided by"),
      number_or_off("fixed_length", "off", "tokens per sequence, for reduction = \"fixed_length\"",
                    kNonNegative, true),
      choice("denominator", {"original", "kept"},
             "whether dropped tokens stay in the denominator or leave it"),
  };
  return keys;
}

void apply_common_keys(const KeyValues& v, LossSpec& spec) {
  spec.shaping.adv_tau = v.number("adv_tau");
  spec.shaping.teacher_tau = v.number("teacher_tau");
  if (spec.shaping.adv_tau == 0 && spec.shaping.teacher_tau == 0) {
    v.refuse("adv_tau", "with teacher_tau = 0 there is no policy term left");
  }
  const std::string& reduction = v.text("reduction");
  for (ReductionKind kind :
       {ReductionKind::token_mean, ReductionKind::seq_mean_token_mean,
        ReductionKind::seq_mean_token_sum, ReductionKind::fixed_length, ReductionKind::sum}) {
    const char* names[] = {"token_mean", "seq_mean_token_mean", "seq_mean_token_sum",
                           "fixed_length", "sum"};
    if (reduction == names[static_cast<int>(kind)]) spec.reduction.kind = kind;
  }
  const auto fixed_length = v.number_or_off("fixed_length");
  if (spec.reduction.kind == ReductionKind::fixed_length) {
    if (!fixed_length)
      v.refuse("reduction", "needs fixed_length, the tokens each sequence counts for");
    spec.reduction.fixed_length = *fixed_length;
  } else if (fixed_length) {
    v.refuse("fixed_length",
             fmt::format("inert: reduction is \"{}\", not \"fixed_length\"", reduction));
  }
  if (v.text("denominator") == "kept") {
    if (spec.reduction.kind == ReductionKind::sum) {
      v.refuse("denominator", "inert: reduction \"sum\" divides by nothing");
    }
    bool drops = !spec.gates.empty() || spec.m2_threshold;
    for (const Correction& c : spec.corrections) drops |= !c.weight || c.weight->keep != Bounds{};
    if (!drops) {
      v.refuse("denominator", "inert: this preset drops no tokens");
    }
    spec.reduction.denominator = Denominator::kept;
  }
}

const std::map<std::string, std::string, std::less<>>& renamed_keys() {
  static const std::string kEps =
      "is another code base's name; here clip bands are eps_low and eps_high, distances from one";
  static const std::string kAbsolute =
      "is an absolute bound elsewhere; here absolute bounds are named *_ratio_low and *_ratio_high "
      "(cispo: ratio_low, ratio_high) and distances from one eps_low and eps_high";
  static const std::string kTis =
      "is slime's absolute bound of prox/rollout (off_policy_is: pi/rollout); here tis_cap (+tis), "
      "tis_ratio_low and tis_ratio_high (+icepop_tis), ois_ratio_low and ois_ratio_high "
      "(+off_policy_is). It is not eps_clip, a distance from one around pi/prox";
  static const std::string kDppo =
      "changed its meaning: a probability difference in prime-rl's dppo loss, a ratio bound in "
      "IPO+KL (PR 2423), gone in IcePop (PR 2401). Say which you mean: dppo_diff_low and "
      "dppo_diff_high (dppo_tv, dppo_kl), ipo_ratio_low and ipo_ratio_high (ipo_kl), "
      "icepop_ratio_low and icepop_ratio_high (icepop)";
  static const std::string kDual = "is another code base's name for dual_clip";
  static const std::string kRef =
      "is another code base's name; the coefficient of the k3 penalty against ref is ref_kl (grpo)";
  static const std::map<std::string, std::string, std::less<>> table = {
      {"dppo_mask_low", kDppo},
      {"dppo_mask_high", kDppo},
      {"kl_tau",
       "has no term to act on: icepop (PR 2401) and dppo_tv (PR 2434) dropped the KL penalty. "
       "ipo_kl pays it on kept tokens only, dppo_kl on every trained token"},
      {"ipo_threshold",
       "bounded |pi - rollout| in prime-rl's ipo loss; here dppo_tv with dppo_diff_low and "
       "dppo_diff_high"},
      {"icepop_threshold",
       "is cookbook's symmetric band [1/x, x]; here icepop_ratio_low and icepop_ratio_high "
       "(icepop) "
       "or tis_ratio_low and tis_ratio_high (+icepop_tis)"},
      {"eps_clip", kEps + ". It is not tis_clip, an absolute bound of prox/rollout"},
      {"eps_clip_high", kEps},
      {"eps_clip_higher", kEps},
      {"clip_ratio", kEps},
      {"clip_ratio_low", kEps},
      {"clip_ratio_high", kEps},
      {"epsilon", kEps},
      {"epsilon_low", kEps},
      {"epsilon_high", kEps + " (for TRL's and Liger's cispo it is absolute: ratio_high)"},
      {"clip_low_threshold", kAbsolute},
      {"clip_high_threshold", kAbsolute},
      {"tis_clip", kTis},
      {"tis_clip_low", kTis},
      {"eps_clip_c", kDual},
      {"clip_ratio_c", kDual},
      {"c_clip", kDual},
      {"delta",
       kDual + " (TRL's delta caps the ratio before the clip, which is the same above it)"},
      {"kl_beta", kRef},
      {"beta", kRef + "; dro's penalty is dro_beta"},
      {"kl_coef", kRef},
      {"kl_loss_coef", kRef},
      {"loss_agg_mode", "is verl's name for reduction"},
      {"agg", "is verl's name for reduction"},
      {"reducer", "is slime's name for reduction"},
  };
  return table;
}

}  // namespace leeway
