// verl: pi against prox, dual clip always on, rejection replaces the response mask.

#include <fmt/format.h>

#include <cmath>
#include <cstdlib>

#include "core/foreign/foreign.h"

namespace leeway {
namespace {

void aggregate(LossSpec& spec, ForeignSettings& s) {
  const std::string key = s.spelled("loss_agg_mode", "agg"), agg = s.text(key, "token-mean");
  if (agg == "token-mean") {
    spec.reduction.kind = ReductionKind::token_mean;
  } else if (agg == "token-sum") {
    spec.reduction.kind = ReductionKind::sum;
  } else if (agg == "seq-mean-token-sum") {
    spec.reduction.kind = ReductionKind::seq_mean_token_sum;
  } else if (agg == "seq-mean-token-mean") {
    spec.reduction.kind = ReductionKind::seq_mean_token_mean;
  } else if (agg == "seq-mean-token-sum-norm") {
    spec.reduction.kind = ReductionKind::fixed_length;
    spec.reduction.fixed_length = s.optional_above("loss_scale_factor", 0.0).value_or(0.0);
  } else {
    s.refuse(key,
             "must be token-mean, token-sum, seq-mean-token-sum, seq-mean-token-mean or "
             "seq-mean-token-sum-norm");
  }
}

Bounds ratios(ForeignSettings& s) {
  const double ratio = s.number("clip_ratio", 0.2);
  return {s.number("clip_ratio_low", ratio), s.number("clip_ratio_high", ratio)};
}

Bounds band(ForeignSettings& s) {
  const Bounds eps = ratios(s);
  return {1.0 - eps.low, 1.0 + eps.high};
}

double parse_number(ForeignSettings& s, const std::string& key, const std::string& text) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  if (text.empty() || end != text.c_str() + text.size()) s.refuse(key, "must be LOW_HIGH or HIGH");
  return value;
}

// "0.5_2.0" or "2.0": (low if given, high).
std::pair<std::optional<double>, double> threshold(ForeignSettings& s, const std::string& key,
                                                   const std::string& text) {
  const size_t bar = text.find('_');
  if (bar == std::string::npos) return {std::nullopt, parse_number(s, key, text)};
  return {parse_number(s, key, text.substr(0, bar)), parse_number(s, key, text.substr(bar + 1))};
}

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts{""};
  for (char c : text) {
    if (c == ',') {
      parts.emplace_back();
    } else if (c != ' ') {
      parts.back() += c;
    }
  }
  return parts;
}

void add_rejection(LossSpec& spec, ForeignSettings& s) {
  const std::string rs = s.spelled("rollout_rs", "rs");
  const std::string bounds = s.spelled("rollout_rs_threshold", "rs_threshold");
  const auto options = split(s.text(rs, "token_k1"));
  const auto thresholds = split(s.text(bounds, "2.0"));
  for (size_t k = 0; k < options.size(); ++k) {
    const std::string& option = options[k];
    const auto [low, high] = threshold(s, bounds, thresholds[std::min(k, thresholds.size() - 1)]);
    Gate gate{.scope = GateScope::mask, .log_clamp = 20.0};
    if (option.starts_with("token_")) {
      gate.level = Level::token;
    } else if (option.starts_with("seq_sum_")) {
      gate.level = Level::sequence;
    } else if (option.starts_with("seq_mean_")) {
      gate.level = Level::geometric;
    } else if (option.starts_with("seq_max_")) {
      gate.level = Level::max;
    } else {
      s.refuse(rs, "must be token_, seq_sum_, seq_mean_ or seq_max_ followed by k1, k2 or k3");
    }
    if (option.ends_with("k1")) {
      // Its sign is that of rollout/prox: the inverse of the importance weights.
      gate.quantity = Quantity::k1;
      gate.pair = {Stream::rollout, Stream::prox};
      gate.keep = {std::log(low.value_or(1.0 / high)), std::log(high)};
    } else {
      gate.quantity = option.ends_with("k2") ? Quantity::k2 : Quantity::k3;
      gate.pair = kProxRollout;
      gate.keep = {-kInfinity, high};
    }
    spec.gates.push_back(gate);
  }
  spec.reduction.denominator = Denominator::kept;
}

void add_importance_weights(LossSpec& spec, ForeignSettings& s) {
  const std::string level =
      s.one_of(s.spelled("rollout_is", "level"), "sequence", {"token", "sequence"});
  Weight weight{.level = level == "token" ? Level::token : Level::sequence, .log_clamp = 20.0};
  const std::string bounds = s.spelled("rollout_is_threshold", "threshold");
  const auto [low, high] = threshold(s, bounds, s.text(bounds, "2.0"));
  if (low) {
    weight.keep = {*low, high};
  } else {
    weight.clamp = {0.0, high};
  }
  spec.corrections.push_back(weight_correction("rollout_is", weight));
  if (s.flag(s.spelled("rollout_is_batch_normalize", "batch_norm"), false)) {
    spec.weight_normalisation =
        weight.level == Level::token ? WeightNormalisation::token : WeightNormalisation::sequence;
  }
}

LossSpec dppo(ForeignSettings& s, Quantity quantity) {
  LossSpec spec;
  const Bounds limits = ratios(s);
  spec.ratio = {.pair = kPiProx, .log_clamp = 20.0};
  spec.surrogate = {.kind = SurrogateKind::detached_ratio,
                    .clip = {-kInfinity, s.number("clip_ratio_c", 3.0)}};
  spec.gates.push_back({.quantity = quantity,
                        .pair = kPiProx,
                        .keep = {-limits.low, limits.high},
                        .sign = SignRule::zero_takes_low});
  aggregate(spec, s);
  return spec;
}

}  // namespace

std::optional<LossSpec> verl_spec(std::string_view loss, ForeignSettings& s) {
  LossSpec spec;
  spec.ratio.pair = kPiProx;
  if (loss == "vanilla" || loss == "vanilla+IS" || loss == "vanilla+RS") {
    spec.ratio.log_clamp = 20.0;
    spec.surrogate = {.kind = SurrogateKind::clipped,
                      .clip = band(s),
                      .dual_clip = s.above("clip_ratio_c", 3.0, 1.0)};
    aggregate(spec, s);
    if (loss == "vanilla+IS") add_importance_weights(spec, s);
    if (loss == "vanilla+RS") add_rejection(spec, s);
  } else if (loss == "dppo_tv") {
    spec = dppo(s, Quantity::difference);
  } else if (loss == "dppo_kl") {
    spec = dppo(s, Quantity::signed_binary_kl);
  } else if (loss == "gspo") {
    spec.ratio.level = Level::geometric;
    spec.ratio.log_cap = 10.0;
    spec.surrogate = {.kind = SurrogateKind::clipped, .clip = band(s)};
    spec.reduction.kind = ReductionKind::seq_mean_token_mean;  // forced by the source
  } else if (loss == "sapo") {
    spec.ratio.log_clamp = 20.0;
    spec.surrogate = {.kind = SurrogateKind::soft_gate,
                      .tau_pos = s.above("tau_pos", 1.0, 0.0),
                      .tau_neg = s.above("tau_neg", 1.05, 0.0)};
    spec.reduction.kind = ReductionKind::seq_mean_token_mean;  // forced by the source
  } else if (loss == "gpg") {
    spec.surrogate.kind = SurrogateKind::log_prob;
    aggregate(spec, s);
  } else if (loss == "geo_mean") {
    // One scalar per sequence: every token carries it, so the mean of means is the source's mean.
    const Bounds limits = ratios(s);
    spec.ratio = {.pair = kPiProx,
                  .level = Level::geometric,
                  .route = Route::through_mean,
                  .signed_log_clip = Bounds{-limits.low, limits.high}};
    spec.shaping.sequence_mean = true;
    spec.reduction = {.kind = ReductionKind::seq_mean_token_mean, .count_empty = true};
  } else if (loss == "dro") {
    spec.surrogate.kind = SurrogateKind::log_prob;
    spec.penalties.push_back(
        {.kind = PenaltyKind::k2, .pair = kPiProx, .coefficient = s.above("dro_beta", 0.05, 0.0)});
    aggregate(spec, s);
  } else if (loss == "cispo") {
    spec.ratio.log_clamp = 20.0;
    spec.surrogate = {.kind = SurrogateKind::detached_ratio, .clip = band(s)};
    aggregate(spec, s);
  } else if (loss == "kl_cov") {
    spec.penalties.push_back({.kind = PenaltyKind::absolute,
                              .pair = kPiProx,
                              .coefficient = s.number("ppo_kl_coef", 0.1),
                              .gate = PenaltyGate::selected});
    spec.covariance_selection = CovarianceSelection{s.number("kl_cov_ratio", 0.0002)};
    aggregate(spec, s);
  } else {
    return std::nullopt;
  }
  return spec;
}

}  // namespace leeway
