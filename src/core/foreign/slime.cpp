// slime: pi against prox, weights as hooks, means over samples of original-mask token means.

#include <fmt/format.h>

#include <cmath>

#include "core/foreign/foreign.h"
#include "core/quantities.h"

namespace leeway {
namespace {

void reduce(LossSpec& spec, ForeignSettings& s) {
  const std::string key = s.spelled("calculate_per_token_loss", "reducer");
  const std::string reducer = key == "reducer"     ? s.text(key, "sample_mean")
                              : s.flag(key, false) ? "token_mean"
                                                   : "sample_mean";
  if (reducer == "sample_mean") {
    spec.reduction = {.kind = ReductionKind::seq_mean_token_mean, .count_empty = true};
  } else if (reducer == "token_mean") {
    spec.reduction.kind = ReductionKind::token_mean;
  } else {
    s.refuse("reducer", "must be sample_mean or token_mean");
  }
}

Pair old_pair(ForeignSettings& s) {
  const std::string key = s.spelled("use_rollout_logprobs", "old");
  const bool rollout =
      key == "old" ? s.one_of(key, "prox", {"prox", "rollout"}) == "rollout" : s.flag(key, false);
  return rollout ? kPiRollout : kPiProx;
}

LossSpec ppo(ForeignSettings& s, std::optional<double> dual_clip) {
  LossSpec spec;
  spec.ratio.pair = old_pair(s);
  const double eps = s.number("eps_clip", 0.2);
  spec.surrogate = {
      .kind = SurrogateKind::clipped,
      .clip = {1.0 - eps, 1.0 + s.number("eps_clip_high", eps)},
      .dual_clip = s.optional_above("eps_clip_c", 1.0, dual_clip).value_or(kInfinity)};
  return spec;
}

// Importance weights, rejection and veto of the mismatch helper.
struct Mis {
  bool use_tis, use_rs;
  Level tis_level, rs_level;
  std::string tis_mode;
  Bounds tis, rs;
  double log_veto;
};

template <class T>
void apply_mis(const Mis& mis, const SequenceView<T>& seq, SequenceEffect<T> effect) {
  const size_t n = seq.mask.size();
  double sum = 0.0, count = 0.0;
  bool veto = false;
  for (size_t t = 0; t < n; ++t) {
    if (!seq.mask[t]) continue;
    const double d = static_cast<double>(seq.prox[t]) - static_cast<double>(seq.rollout[t]);
    sum += d, count += 1.0;
    veto |= d < mis.log_veto;
  }
  auto weight = [&](Level level, size_t t) {
    const double d = level == Level::token
                         ? static_cast<double>(seq.prox[t]) - static_cast<double>(seq.rollout[t])
                     : level == Level::sequence ? sum
                                                : sum / std::max(count, 1.0);
    return std::exp(std::clamp(d, -20.0, 20.0));
  };
  auto outside = [](double w, const Bounds& b) { return below(w, b.low) || above(w, b.high); };
  for (size_t t = 0; t < n; ++t) {
    if (!seq.mask[t]) continue;
    if (mis.use_tis) {
      double w = weight(mis.tis_level, t);
      if (mis.tis_mode == "mask") {
        if (outside(w, mis.tis)) effect.mask[t] = 0;
      } else {
        w = limit(w, {mis.tis_mode == "clip" ? mis.tis.low : 0.0, mis.tis.high});
      }
      effect.weights[t] = static_cast<T>(w);
    }
    if (mis.use_rs && (veto || outside(weight(mis.rs_level, t), mis.rs))) effect.mask[t] = 0;
  }
}

LossSpec ppo_mis(ForeignSettings& s) {
  LossSpec spec = ppo(s, {});
  auto level = [&](const char* key) {
    const std::string text = s.text(key, "token");
    if (text == "token") return Level::token;
    if (text == "sequence") return Level::sequence;
    if (text == "geometric") return Level::geometric;
    s.refuse(key, "must be token, sequence or geometric");
  };
  Mis mis;
  mis.use_tis = s.flag("use_tis", true);
  mis.use_rs = s.flag("use_rs", true);
  mis.tis_level = level("tis_level");
  mis.rs_level = level("rs_level");
  mis.tis_mode = s.text("tis_mode", "truncate");
  mis.tis.high = s.number("tis_upper_bound", 2.0);
  mis.tis.low = s.optional_number("tis_lower_bound").value_or(1.0 / mis.tis.high);
  const auto rs_high = s.optional_number("rs_upper_bound");
  const auto rs_low = s.optional_number("rs_lower_bound");
  mis.rs = {rs_low.value_or(mis.tis.low), rs_high.value_or(mis.tis.high)};
  if (mis.use_rs && mis.rs.low > mis.rs.high) {
    spec.warnings.push_back(
        fmt::format("rejection keeps what lies from {} to {}: its low end lies above its high end, "
                    "so that every token is dropped",
                    mis.rs.low, mis.rs.high));
  }
  mis.log_veto = std::log(s.optional_number("rs_veto_threshold", 1e-4).value_or(0.0));
  if (s.flag("tis_batch_normalize", true) && mis.use_tis) {
    if (mis.tis_level == Level::geometric) {
      s.refuse("tis_batch_normalize", "the source refuses batch normalisation at geometric level");
    }
    spec.weight_normalisation =
        mis.tis_level == Level::token ? WeightNormalisation::token : WeightNormalisation::sequence;
  }
  spec.corrections.push_back(
      make_correction("mis",
                      fmt::format("{} prox/rollout in [{}, {}], rejection outside [{}, {}]",
                                  mis.tis_mode, mis.tis.low, mis.tis.high, mis.rs.low, mis.rs.high),
                      {Stream::prox, Stream::rollout},
                      [mis](const auto& seq, auto effect) { apply_mis(mis, seq, effect); }));
  return spec;
}

}  // namespace

std::optional<LossSpec> slime_spec(std::string_view loss, ForeignSettings& s) {
  LossSpec spec;
  const size_t plus = loss.find('+');
  const std::string_view base = loss.substr(0, plus);
  const std::string_view hook = plus == std::string_view::npos ? "" : loss.substr(plus + 1);
  if (hook == "mis") {
    spec = ppo_mis(s);
    reduce(spec, s);
    return spec;
  }
  if (base == "ppo" || base == "ppo_dual") {
    spec = ppo(s, base == "ppo_dual" ? std::optional<double>(3.0) : std::nullopt);
  } else if (base == "gspo") {
    spec = ppo(s, {});
    spec.ratio.level = Level::geometric;
    spec.ratio.route = Route::through_mean;
  } else if (base == "cispo" || base == "cispo_canonical") {
    const bool canonical = base == "cispo_canonical";
    const double eps = s.number("eps_clip", canonical ? 1.0 : 0.2);
    spec.ratio.pair = old_pair(s);
    spec.surrogate = {.kind = SurrogateKind::detached_ratio,
                      .clip = {1.0 - eps, 1.0 + s.number("eps_clip_high", canonical ? 4.0 : eps)}};
  } else if (base == "reinforce") {
    spec.ratio.pair = old_pair(s);  // only its metrics look at it
    spec.surrogate.kind = SurrogateKind::log_prob;
  } else {
    return std::nullopt;
  }
  reduce(spec, s);
  if (hook.empty()) return base == "reinforce" ? std::nullopt : std::optional(spec);

  Bounds bounds;
  if (hook == "off_policy_is_eps_from_1") {
    const auto low = s.optional_number("tis_clip_low"), high = s.optional_number("tis_clip");
    const double eps = low && high ? 0.2 : s.number("eps_clip", 0.2);
    bounds = {low.value_or(1.0 - eps), high ? *high : 1.0 + s.number("eps_clip_high", eps)};
  } else {
    bounds = {s.number("tis_clip_low", 0.0), s.number("tis_clip", 2.0)};
  }
  if (hook == "vanilla_tis") {
    spec.corrections.push_back(weight_correction("vanilla_tis", {.clamp = bounds}));
  } else if (hook == "icepop") {
    spec.corrections.push_back(weight_correction("icepop", {.keep = bounds}));
  } else if (hook == "off_policy_is_PR2084" || hook == "off_policy_is_eps_from_1") {
    spec.corrections.push_back(
        weight_correction("off_policy_is", {.pair = kPiRollout, .clamp = bounds}));
  } else {
    return std::nullopt;
  }
  return spec;
}

}  // namespace leeway
