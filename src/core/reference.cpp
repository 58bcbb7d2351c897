// The reference implementation: scalar, double, one formula per line. It is the definition of what
// a spec means; the SIMD and CUDA implementations are tested against it. It is not meant to be
// fast.
//
// Two passes per sequence: the first gathers sequence statistics (levels, corrections), the second
// gives each token's loss and gradient.

#include <fmt/format.h>

#include <cmath>
#include <numeric>

#include "core/extensions.h"
#include "core/gates.h"
#include "core/participation.h"
#include "core/quantities.h"
#include "core/sequence_math.h"
#include "leeway/error.h"
#include "leeway/loss.h"
#include "leeway/metrics.h"

namespace leeway {
namespace {

// A penalty's value and its derivative by log pi, for the log ratio x of its pair.
std::pair<double, double> penalty_of(const Penalty& p, double x) {
  const double toward_pi =
      (p.pair.numerator == Stream::pi) - static_cast<double>(p.pair.denominator == Stream::pi);
  double value = 0.0, slope = 0.0;
  switch (p.kind) {
    case PenaltyKind::k1: value = x, slope = 1.0; break;
    case PenaltyKind::k2: value = 0.5 * x * x, slope = x; break;
    case PenaltyKind::k3: value = k3(x), slope = std::expm1(x); break;
    case PenaltyKind::squared_log: value = x * x, slope = 2.0 * x; break;
    case PenaltyKind::absolute: value = std::abs(x), slope = (x > 0) - (x < 0); break;
  }
  return {p.coefficient * value, p.gradient ? p.coefficient * slope * toward_pi : 0.0};
}

class Evaluation {
 public:
  Evaluation(const LossSpec& spec, const BatchView<double>& batch)
      : spec_(spec), batch_(batch), n_(static_cast<size_t>(batch.token_count())) {
    check_streams(spec, batch);
    check_finite(spec, batch);
    original_ = trained_ = participating(spec, batch);
    dropped_.assign(n_, 0);
    penalty_dropped_.assign(n_, 0);
    if (spec.m2_threshold) {
      const std::vector<uint8_t> narrowed = narrow_mask(spec, batch);
      for (size_t i = 0; i < n_; ++i) {
        dropped_[i] = penalty_dropped_[i] = trained_[i] && !narrowed[i];
      }
    }
    weights_.assign(n_, 1.0);
    trace_.assign(n_, {});
    apply_mask_gates();
    apply_corrections();
    apply_policy_gates();
    if (spec.covariance_selection) selected_ = select_by_covariance(spec, batch, trained_);
  }

  // Trained tokens by unit, as the reduction counts them.
  const std::vector<uint8_t>& counted() {
    if (spec_.reduction.denominator == Denominator::original) return original_;
    counted_ = trained_;
    for (size_t i = 0; i < n_; ++i) {
      counted_[i] = trained_[i] && !dropped_[i] && weights_[i] != 0.0;
    }
    return counted_;
  }

  LossResult run(double denominator, MetricSums* metrics);
  std::vector<TokenTrace> take_trace() { return std::move(trace_); }

 private:
  SequenceView<double> sequence(int64_t s, std::span<const uint8_t> mask) const {
    return sequence_of(batch_, s, mask);
  }
  void apply_mask_gates();
  void apply_corrections();
  void apply_policy_gates();
  void run_sequence(int64_t s, double scale, LossResult& result);
  double shaped_advantage(const SequenceView<double>& seq, size_t t, size_t i, double mean) const;
  void add_metrics(int64_t s, MetricSums& sums) const;

  const LossSpec& spec_;
  const BatchView<double>& batch_;
  size_t n_;
  std::vector<uint8_t> original_, trained_, counted_, dropped_, penalty_dropped_, selected_;
  std::vector<double> weights_;
  std::vector<TokenTrace> trace_;
};

void Evaluation::apply_mask_gates() {
  std::vector<uint8_t> narrowed = trained_;
  for (const Gate& gate : spec_.gates) {
    if (gate.scope != GateScope::mask) continue;
    for (int64_t s = 0; s < batch_.sequence_count(); ++s) {
      const size_t first = first_position(batch_, s);
      apply_gate(gate, sequence(s, trained_), [&](size_t t, GateVerdict verdict) {
        if (verdict.dropped()) narrowed[first + t] = 0;
      });
    }
  }
  trained_ = std::move(narrowed);
}

void Evaluation::apply_corrections() {
  std::vector<double> factor(n_);
  std::vector<uint8_t> mask(n_);
  for (const Correction& correction : spec_.corrections) {
    std::fill(factor.begin(), factor.end(), 1.0);
    mask = trained_;
    for (int64_t s = 0; s < batch_.sequence_count(); ++s) {
      const size_t first = first_position(batch_, s);
      const auto seq = sequence(s, trained_);
      correction.apply_double(seq, {std::span(factor).subspan(first, seq.mask.size()),
                                    std::span(mask).subspan(first, seq.mask.size())});
    }
    for (size_t i = 0; i < n_; ++i) {
      if (!trained_[i]) continue;
      weights_[i] *= factor[i];
      if (!mask[i]) dropped_[i] = penalty_dropped_[i] = 1;
    }
  }
  normalise_weights(spec_, batch_, std::span<const uint8_t>(trained_), std::span(weights_));
  // A weight that float32 cannot hold is zero, as it is in the other implementations.
  for (double& weight : weights_) {
    if (static_cast<float>(weight) == 0.0f) weight = 0.0;
  }
}

void Evaluation::apply_policy_gates() {
  for (const Gate& gate : spec_.gates) {
    if (gate.scope == GateScope::mask) continue;
    for (int64_t s = 0; s < batch_.sequence_count(); ++s) {
      const size_t first = first_position(batch_, s);
      apply_gate(gate, sequence(s, trained_), [&](size_t t, GateVerdict verdict) {
        const size_t i = first + t;
        trace_[i].below |= verdict.below;
        trace_[i].above |= verdict.above;
        if (!verdict.dropped()) return;
        dropped_[i] = 1;
        if (gate.scope == GateScope::policy_and_penalty) penalty_dropped_[i] = 1;
      });
    }
  }
}

double Evaluation::shaped_advantage(const SequenceView<double>& seq, size_t t, size_t i,
                                    double mean) const {
  const Shaping& shaping = spec_.shaping;
  if (shaping.times_mask && !in_mask(batch_, i)) return 0.0;
  const double A = shaping.sequence_mean ? mean : seq.advantages[t];
  double shaped = shaping.constant_one ? 1.0 : shaping.adv_tau * A;
  if (shaping.teacher_tau != 0.0) {
    shaped += shaping.teacher_tau * (seq.stream(shaping.teacher)[t] - seq.pi[t]);
  }
  return shaped;
}

void Evaluation::run_sequence(int64_t s, double scale, LossResult& result) {
  const size_t first = first_position(batch_, s);
  const auto seq = sequence(s, trained_);
  const size_t length = seq.mask.size();
  const auto num = seq.stream(spec_.ratio.pair.numerator);
  const auto den = seq.stream(spec_.ratio.pair.denominator);
  const bool uses_ratio = uses_ratio_of(spec_);
  // Pass 1: the sequence's mean advantage and, above token level, its log ratio.
  double trained = 0.0, mean_A = 0.0, log_ratio_sum = 0.0, counted = 0.0;
  for (size_t t = 0; t < length; ++t) {
    if (seq.mask[t]) trained += 1.0, mean_A += seq.advantages[t];
    if (uses_ratio && spec_.ratio.level != Level::token &&
        in_statistic(spec_, batch_, seq, first, t)) {
      log_ratio_sum += clipped_log_ratio(spec_, num[t], den[t], seq.advantages[t]).first;
      counted += 1.0;
    }
  }
  if (trained == 0.0) return;
  mean_A /= trained;
  const double sequence_log_ratio = spec_.ratio.level == Level::geometric
                                        ? log_ratio_sum / std::max(counted, 1.0)
                                        : log_ratio_sum;

  // Pass 2: loss and gradient of each token.
  double through_mean = 0.0;  // d loss / d the sequence's log ratio
  for (size_t t = 0; t < length; ++t) {
    if (!seq.mask[t]) continue;
    const size_t i = first + t;
    TokenTrace& trace = trace_[i];
    const double c = scale * (batch_.weights.empty() ? 1.0 : batch_.weights[i]);
    const double A = shaped_advantage(seq, t, i, mean_A);

    double r = 1.0;
    bool live = true;
    if (uses_ratio) {
      const double x = spec_.ratio.level == Level::token ? num[t] - den[t] : sequence_log_ratio;
      const double limited = std::min(clamp_log(x, spec_.ratio.log_clamp), spec_.ratio.log_cap);
      live = limited == x;
      r = std::exp(limited);
    }
    const double sign_of = spec_.shaping.sequence_mean ? mean_A : seq.advantages[t];
    const SurrogateValue policy = surrogate_of(spec_.surrogate, r, A, sign_of, seq.pi[t]);
    trace.ratio = r;
    trace.weight = weights_[i];
    trace.trained = true;
    trace.dropped = dropped_[i] != 0;
    trace.clip_binding = policy.clip_binding;
    trace.dual_clipped = policy.dual_clipped;
    const bool by_ratio_alone = spec_.surrogate.kind != SurrogateKind::log_prob &&
                                spec_.surrogate.kind != SurrogateKind::detached_ratio;
    const bool dead = by_ratio_alone && A != 0 && !live;
    trace.kept = !dropped_[i] && weights_[i] != 0.0 && !policy.cut && !dead;

    double by_ratio = 0.0, by_log_prob = 0.0;
    if (!dropped_[i] && weights_[i] != 0.0) {
      trace.policy = weights_[i] * policy.loss;
      by_ratio = live ? weights_[i] * policy.by_ratio : 0.0;
      by_log_prob = weights_[i] * policy.by_log_prob;
      if (trace.kept) trace.coefficient = weights_[i] * policy.coefficient;
    }
    for (const Penalty& penalty : spec_.penalties) {
      const bool open = penalty.gate == PenaltyGate::all                 ? true
                        : penalty.gate == PenaltyGate::kept              ? !dropped_[i]
                        : penalty.gate == PenaltyGate::nonzero_advantage ? seq.advantages[t] != 0.0
                                                                         : selected_[i] != 0;
      if (!open || penalty_dropped_[i]) continue;
      const double x =
          seq.stream(penalty.pair.numerator)[t] - seq.stream(penalty.pair.denominator)[t];
      auto [value, derivative] = penalty_of(penalty, x);
      if (penalty.times_ratio) {
        value *= r, derivative *= r;
        if (live) by_ratio += value;
      }
      trace.penalty += value;
      by_log_prob += derivative;
    }

    result.loss += c * (trace.policy + trace.penalty);
    result.grad[i] += c * by_log_prob;
    if (spec_.ratio.level == Level::token || spec_.ratio.route == Route::straight_through) {
      result.grad[i] += c * by_ratio;
    } else {
      through_mean += c * by_ratio;
    }
    if (!std::isfinite(trace.policy + trace.penalty)) {
      throw_overflow(s, static_cast<int64_t>(i) - batch_.offsets[s], r);
    }
  }

  const PaddingTerm padding = padding_of(spec_, batch_, s, sequence_log_ratio, scale);
  result.loss += padding.loss;
  through_mean += padding.by_ratio;
  if (spec_.ratio.level != Level::token && spec_.ratio.route == Route::through_mean) {
    if (spec_.ratio.level == Level::geometric) through_mean /= std::max(counted, 1.0);
    for (size_t t = 0; t < length; ++t) {
      if (!in_statistic(spec_, batch_, seq, first, t)) continue;
      const double slope = clipped_log_ratio(spec_, num[t], den[t], seq.advantages[t]).second;
      result.grad[first + t] += through_mean * slope;
    }
  }
  for (size_t t = 0; t < length; ++t) {
    const size_t i = first + t;
    if (!std::isfinite(result.grad[i])) {
      throw_overflow(s, static_cast<int64_t>(i) - batch_.offsets[s], trace_[i].ratio);
    }
  }
}

LossResult Evaluation::run(double denominator, MetricSums* metrics) {
  LossResult result;
  result.denominator = std::max(1.0, denominator);
  result.grad.assign(n_, 0.0);
  const std::vector<double> scales = sequence_scales(spec_, batch_, counted(), result.denominator);
  for (int64_t s = 0; s < batch_.sequence_count(); ++s) {
    run_sequence(s, scales[static_cast<size_t>(s)], result);
    if (metrics != nullptr) add_metrics(s, *metrics);
  }
  if (!std::isfinite(result.loss)) {
    throw Error("the loss is not finite although every token's is: scale the advantages");
  }
  return result;
}

void Evaluation::add_metrics(int64_t s, MetricSums& sums) const {
  const auto seq = sequence(s, trained_);
  const size_t first = first_position(batch_, s);
  bool any = false, any_kept = false;
  for (size_t t = 0; t < seq.mask.size(); ++t) {
    if (!seq.mask[t]) continue;
    const size_t i = first + t;
    const TokenTrace& trace = trace_[i];
    const double A = seq.advantages[t];
    const bool dropped = dropped_[i] || weights_[i] == 0.0;
    any = true;
    any_kept |= trace.kept;
    sums[Slot::tokens] += 1;
    sums[Slot::positive_tokens] += A > 0;
    sums[Slot::negative_tokens] += A < 0;
    sums[Slot::dropped] += dropped;
    sums[Slot::dropped_low] += trace.below;
    sums[Slot::dropped_high] += trace.above;
    sums[Slot::dropped_positive] += dropped && A > 0;
    sums[Slot::dropped_negative] += dropped && A < 0;
    sums[Slot::kept] += trace.kept;
    sums[Slot::penalty] += trace.penalty;
    const double coefficient = std::min(trace.coefficient, kRatioSumCap);
    sums[Slot::coefficient] += coefficient;
    sums[Slot::coefficient_squared] += coefficient * coefficient;
    sums[Slot::weight] += weights_[i];
    sums[Slot::weight_zero] += weights_[i] == 0.0;
    sums.raise(Slot::weight_max, weights_[i]);
    if (!batch_.versions.empty()) {
      sums.raise(Slot::version_min, batch_.versions[i]);
      sums.raise(Slot::version_max, batch_.versions[i]);
    }
    if (!seq.rollout.empty()) {
      const double x = seq.pi[t] - seq.rollout[t];
      const double r = std::exp(x), kl = k3(x), summed = std::min(r, kRatioSumCap);
      sums[Slot::kl] += kl;
      sums[Slot::kl_positive] += A > 0 ? kl : 0.0;
      sums[Slot::kl_negative] += A < 0 ? kl : 0.0;
      sums[Slot::kl_dropped] += dropped ? kl : 0.0;
      sums[Slot::abs_log_ratio] += std::abs(x);
      sums[Slot::ratio] += summed;
      sums[Slot::ratio_squared] += summed * summed;
      sums.raise(Slot::ratio_min, r);
      sums.raise(Slot::ratio_max, r);
      sums.raise(Slot::kl_max, kl);
      sums.histogram()[static_cast<size_t>(ratio_bin(static_cast<float>(r)))] += 1;
    }
    if (has_clip(spec_)) {
      const Bounds& clip = spec_.surrogate.clip;
      const bool low = below(trace.ratio, clip.low), high = above(trace.ratio, clip.high);
      sums[Slot::clip_binding] += trace.clip_binding;
      sums[Slot::clip_low] += low;
      sums[Slot::clip_high] += high;
      sums[Slot::clip_signed] += (low && A < 0) || (high && A > 0);
      sums[Slot::clip_dual] += trace.dual_clipped;
    }
    if (!seq.ref.empty()) sums[Slot::ref_kl] += k3(seq.ref[t] - seq.pi[t]);
    if (!seq.teacher.empty()) sums[Slot::teacher_kl] += seq.teacher[t] - seq.pi[t];
  }
  sums[Slot::sequences] += any;
  sums[Slot::sequences_dropped] += any && !any_kept;
}

}  // namespace

double denominator_of(const LossSpec& spec, const BatchView<double>& batch) {
  Evaluation evaluation(spec, batch);
  return count_denominator(spec, batch, evaluation.counted());
}

LossResult evaluate_reference(const LossSpec& spec, const BatchView<double>& batch,
                              std::optional<double> denominator, MetricSums* metrics,
                              bool want_trace) {
  Evaluation evaluation(spec, batch);
  if (!denominator) denominator = count_denominator(spec, batch, evaluation.counted());
  LossResult result = evaluation.run(*denominator, metrics);
  if (want_trace) result.trace = evaluation.take_trace();
  return result;
}

}  // namespace leeway
