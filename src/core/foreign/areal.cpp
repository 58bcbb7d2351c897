// AReaL: pi against prox, behaviour weights prox/rollout only through rejection sampling, sums over
// the original mask count.

#include <fmt/format.h>

#include <cmath>

#include "core/foreign/foreign.h"
#include "core/quantities.h"

namespace leeway {
namespace {

struct Rejection {
  bool sequence, clamp;
  std::string metric, agg;
  double upper;
  std::optional<double> lower;
};

// The source works in float32 here and replaces what is not finite by 0.
template <class T>
double log_ratio(const SequenceView<T>& seq, size_t t) {
  const float d = static_cast<float>(seq.prox[t]) - static_cast<float>(seq.rollout[t]);
  return std::isfinite(d) ? d : 0.0;
}

double metric_of(const std::string& metric, double d) {
  if (metric == "kl_k1") return d;
  if (metric == "kl_k2") return 0.5 * d * d;
  return k3(-d);  // kl_k3: the direction of e^-d - 1 + d
}

template <class T>
void apply_rejection(const Rejection& rs, const SequenceView<T>& seq, SequenceEffect<T> effect) {
  const size_t n = seq.mask.size();
  const bool ratio = rs.metric == "ratio";
  double log_sum = 0.0, stat = rs.agg == "max" ? -kInfinity : 0.0, count = 0.0;
  for (size_t t = 0; t < n; ++t) {
    if (!seq.mask[t]) continue;
    const double d = log_ratio(seq, t), value = ratio ? d : metric_of(rs.metric, d);
    log_sum += d, count += 1.0;
    stat = rs.agg == "max" ? std::max(stat, value) : stat + value;
  }
  if (count == 0.0) return;
  if (rs.agg == "mean") stat /= count;
  const double geometric = std::exp(log_sum / count);
  for (size_t t = 0; t < n; ++t) {
    if (!seq.mask[t]) continue;
    const double d = log_ratio(seq, t);
    double value = rs.sequence ? stat : ratio ? d : metric_of(rs.metric, d);
    if (ratio) value = std::exp(value);
    double weight = rs.sequence && ratio ? geometric : std::exp(d);
    if (rs.clamp) {
      weight = limit(weight, {rs.lower.value_or(0.0), rs.upper});
    } else if (above(value, rs.upper) || (rs.lower && below(value, *rs.lower))) {
      effect.mask[t] = 0;
    }
    effect.weights[t] = static_cast<T>(weight);
  }
}

void add_rejection(LossSpec& spec, ForeignSettings& s) {
  Rejection rs;
  rs.sequence = s.one_of("level", "token", {"token", "sequence"}) == "sequence";
  rs.clamp = s.one_of("action", "mask", {"mask", "clamp"}) == "clamp";
  rs.metric = s.one_of("metric", "ratio", {"ratio", "kl_k1", "kl_k2", "kl_k3"});
  rs.agg = s.one_of("agg", "mean", {"sum", "mean", "max"});
  if (rs.metric == "ratio") {
    rs.upper = s.above("upper", 5.0, 1.0);
    rs.lower = s.optional_above("lower", 0.0);
  } else {
    if (rs.clamp) s.refuse("action", "clamp is for metric = \"ratio\" alone, as in its source");
    rs.upper = rs.metric == "kl_k1" ? s.number("upper", 5.0) : s.above("upper", 5.0, 0.0);
    rs.lower = s.optional_number("lower");
  }
  if (rs.lower && *rs.lower > rs.upper) {
    s.refuse("lower", fmt::format("lies above upper = {}", rs.upper));
  }
  spec.corrections.push_back(
      make_correction("rejection_sampling",
                      fmt::format("{} {} at {} level, upper {}", rs.clamp ? "clamp" : "mask",
                                  rs.metric, rs.sequence ? "sequence" : "token", rs.upper),
                      {Stream::prox, Stream::rollout},
                      [rs](const auto& seq, auto effect) { apply_rejection(rs, seq, effect); }));
}

void set_level(LossSpec& spec, ForeignSettings& s, const char* fallback) {
  const std::string key = s.spelled("importance_sampling_level", "level");
  if (s.one_of(key, fallback, {"token", "sequence"}) != "sequence") return;
  spec.ratio.level = Level::geometric;
  spec.ratio.route = Route::through_mean;
  spec.shaping.sequence_mean = true;
}

}  // namespace

std::optional<LossSpec> areal_spec(std::string_view loss, ForeignSettings& s) {
  LossSpec spec;
  spec.ratio.pair = kPiProx;
  auto clipped = [&] {
    const double eps = s.number("eps_clip", 0.2);
    spec.surrogate = {.kind = SurrogateKind::clipped,
                      .clip = {1.0 - eps, 1.0 + s.number("eps_clip_higher", eps)},
                      .dual_clip = s.optional_above("c_clip", 1.0).value_or(kInfinity)};
  };
  if (loss == "ppo" || loss == "ppo_cclip") {
    clipped();
  } else if (loss == "gspo") {
    clipped();
    set_level(spec, s, "sequence");
  } else if (loss == "ppo+RS") {
    clipped();
    add_rejection(spec, s);
  } else if (loss == "cispo" || loss == "cispo+RS_clamp") {
    const double eps = s.number("eps_clip", 0.2);
    spec.surrogate = {.kind = SurrogateKind::detached_ratio,
                      .clip = {1.0 - eps, 1.0 + s.above("eps_clip_higher", eps, 0.0)}};
    if (loss == "cispo+RS_clamp") add_rejection(spec, s);
  } else if (loss == "sapo") {
    spec.surrogate = {.kind = SurrogateKind::soft_gate,
                      .tau_pos = s.above(s.spelled("sapo_tau_pos", "tau_pos"), 1.0, 0.0),
                      .tau_neg = s.above(s.spelled("sapo_tau_neg", "tau_neg"), 1.05, 0.0)};
    if (s.text("pair", "pi/prox") == "pi/rollout") spec.ratio.pair = kPiRollout;
    set_level(spec, s, "token");
  } else if (loss == "m2po+ppo") {
    clipped();
    spec.m2_threshold = s.number("m2_threshold", 0.04);
    spec.reduction.denominator = Denominator::kept;
  } else {
    return std::nullopt;
  }
  return spec;
}

}  // namespace leeway
