// The built-in detached weight. It uses the same interface as a user's correction: a function of
// one sequence that fills weights and may narrow the mask.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <tuple>

#include "core/quantities.h"
#include "core/spec_text.h"
#include "core/vector_math.h"
#include "leeway/error.h"
#include "leeway/loss.h"

namespace leeway {
namespace {

template <class T>
void apply_weight(const Weight& w, const SequenceView<T>& seq, SequenceEffect<T> effect) {
  const auto num = seq.stream(w.pair.numerator), den = seq.stream(w.pair.denominator);
  if (w.level == Level::token) {
    return token_weights(w, num, den, seq.mask, effect.weights);
  }
  const auto mask = w.over == Positions::all ? std::span<const uint8_t>() : seq.mask;
  double sum = 0.0, count = 0.0;
  if (w.token_log_clamp == kInfinity) {
    std::tie(sum, count) = log_ratio_sum(num, den, mask);
  } else {
    for (size_t t = 0; t < num.size(); ++t) {
      if (!mask.empty() && !mask[t]) continue;
      const double x = static_cast<double>(num[t]) - static_cast<double>(den[t]);
      sum += std::min(std::max(x, -w.token_log_clamp), w.token_log_clamp);
      count += 1.0;
    }
  }
  if (count == 0.0) return;
  const double x = w.level == Level::geometric ? sum / count : sum;
  const double raw = std::exp(std::min(std::max(x, -w.log_clamp), w.log_clamp));
  const bool outside = below(raw, w.keep.low) || above(raw, w.keep.high);
  const T weight = static_cast<T>(outside ? 0.0 : limit(raw, w.clamp));
  std::fill(effect.weights.begin(), effect.weights.end(), weight);
}

std::string formula_of(const Weight& w) {
  std::string text = ratio_text(w.pair, w.level);
  const bool low = w.clamp.low > 0, high = w.clamp.high < kInfinity;
  if (low && high) {
    text =
        fmt::format("clamp({}, {}, {})", text, number_text(w.clamp.low), number_text(w.clamp.high));
  } else if (high) {
    text = fmt::format("min({}, {})", text, number_text(w.clamp.high));
  } else if (low) {
    text = fmt::format("max({}, {})", text, number_text(w.clamp.low));
  }
  if (w.keep != Bounds{}) {
    text += fmt::format(", 0 outside [{}, {}]", number_text(w.keep.low), number_text(w.keep.high));
  }
  return text;
}

}  // namespace

Correction weight_correction(std::string name, const Weight& weight) {
  LEEWAY_CHECK(weight.level != Level::max && weight.level != Level::min,
               "a weight is a token's, a mean's or a product's ratio");
  Correction correction = make_correction(
      std::move(name), formula_of(weight), {weight.pair.numerator, weight.pair.denominator},
      [weight](const auto& seq, auto effect) { apply_weight(weight, seq, effect); });
  correction.weight = weight;
  return correction;
}

}  // namespace leeway
