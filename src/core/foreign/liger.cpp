// Liger's chunked GRPO losses, TRL-compatible.

#include <fmt/format.h>

#include <cmath>

#include "core/foreign/foreign.h"

namespace leeway {
namespace {

struct Vespo {
  double k_pos, lambda_pos, k_neg, lambda_neg;
  std::optional<double> is_cap;
};

// phi(w) = e^(lambda + k log w - lambda w), w the sequence's product of ratios. The source folds
// the importance weights in over every position, masked ones included.
template <class T>
void apply_vespo(const Vespo& v, const SequenceView<T>& seq, SequenceEffect<T> effect) {
  double log_w = 0.0;
  for (size_t t = 0; t < seq.mask.size(); ++t) {
    if (seq.mask[t]) {
      const double d = static_cast<double>(seq.pi[t]) - static_cast<double>(seq.prox[t]);
      log_w += std::clamp(d, -20.0, 20.0);
    }
    if (v.is_cap) {
      const double d = static_cast<double>(seq.prox[t]) - static_cast<double>(seq.rollout[t]);
      log_w += std::min(d, std::log(*v.is_cap));
    }
  }
  log_w = std::clamp(log_w, std::log(1e-8), 20.0);
  const double w = std::exp(log_w);
  for (size_t t = 0; t < seq.mask.size(); ++t) {
    const bool positive = seq.advantages[t] >= T(0);
    const double k = positive ? v.k_pos : v.k_neg;
    const double lambda = positive ? v.lambda_pos : v.lambda_neg;
    effect.weights[t] = static_cast<T>(std::exp(lambda + k * log_w - lambda * w));
  }
}

}  // namespace

std::optional<LossSpec> liger_spec(std::string_view loss, ForeignSettings& s) {
  LossSpec spec;
  spec.ratio.pair = kPiProx;
  std::optional<double> is_cap;
  if (!s.text("is_ratio", "").empty()) is_cap = s.number("is_cap", 2.0);

  const bool ppo_like =
      loss == "grpo" || loss == "bnpo" || loss == "dr_grpo" || loss == "dapo" || loss == "luspo";
  if (ppo_like) {
    spec.surrogate = {
        .kind = SurrogateKind::clipped,
        .clip = {1.0 - s.number("epsilon_low", 0.2), 1.0 + s.number("epsilon_high", 0.2)},
        .ratio_cap = s.optional_number("delta").value_or(kInfinity)};
    if (s.text("level", "token") == "sequence") {
      spec.ratio.level = Level::geometric;
      spec.ratio.route = Route::through_mean;
    }
  } else if (loss == "cispo") {
    spec.surrogate = {.kind = SurrogateKind::detached_ratio,
                      .clip = {-kInfinity, s.number("epsilon_high", 5.0)}};
  } else if (loss == "sapo") {
    spec.surrogate = {.kind = SurrogateKind::soft_gate,
                      .tau_pos = s.above("tau_pos", 1.0, 0.0),
                      .tau_neg = s.above("tau_neg", 1.05, 0.0)};
  } else if (loss == "vespo") {
    spec.surrogate.kind = SurrogateKind::log_prob;
    const Vespo vespo{s.number("k_pos", 2.0), s.number("lambda_pos", 3.0), s.number("k_neg", 3.0),
                      s.number("lambda_neg", 2.0), is_cap};
    std::vector<Stream> reads{Stream::pi, Stream::prox};
    if (is_cap) reads.push_back(Stream::rollout);
    spec.corrections.push_back(make_correction(
        "vespo", "phi(product of pi/prox) = e^(lambda + k log w - lambda w)", std::move(reads),
        [vespo](const auto& seq, auto effect) { apply_vespo(vespo, seq, effect); }));
  } else {
    return std::nullopt;
  }
  if (is_cap && loss != "vespo") {
    spec.corrections.push_back(weight_correction("vllm_is_ratio", {.clamp = {0.0, *is_cap}}));
  }

  const double beta = s.number("beta", 0.04);
  if (beta != 0) {
    spec.penalties.push_back({.kind = PenaltyKind::k3,
                              .pair = s.text("reference", "ref") == "teacher"
                                          ? Pair{Stream::teacher, Stream::pi}
                                          : kRefPi,
                              .coefficient = beta,
                              .times_ratio = s.flag("use_bias_correction_kl", false)});
  }

  if (loss == "grpo" || loss == "sapo") {
    spec.reduction = {.kind = ReductionKind::seq_mean_token_mean, .count_empty = true};
  } else if (loss == "dr_grpo") {
    spec.reduction = {.kind = ReductionKind::fixed_length,
                      .fixed_length = s.optional_number("max_completion_length").value_or(0.0),
                      .count_empty = true};
  } else if (loss == "luspo") {
    spec.positions = Positions::all;
    spec.reduction.kind = ReductionKind::padded_length_mean;
  }
  return spec;
}

}  // namespace leeway
