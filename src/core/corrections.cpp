// The built-in detached weight. It goes through the same door as a user's correction: a function of
// one sequence that fills weights and may narrow the mask.

#include <fmt/format.h>

#include <cmath>

#include "core/spec_text.h"
#include "core/vector_math.h"
#include "leeway/error.h"
#include "leeway/loss.h"

namespace leeway {
namespace {

template <class T>
T limited(T raw, const Weight& w) {
  const T clamp_low = static_cast<T>(static_cast<float>(w.clamp.low));
  const T clamp_high = static_cast<T>(static_cast<float>(w.clamp.high));
  // The interval test is made in float32, like every bound.
  const float seen = static_cast<float>(raw);
  if (seen < static_cast<float>(w.keep.low) || seen > static_cast<float>(w.keep.high)) return T(0);
  if (seen > static_cast<float>(w.clamp.high))
    return std::is_same_v<T, double> ? static_cast<T>(w.clamp.high) : clamp_high;
  if (seen < static_cast<float>(w.clamp.low))
    return std::is_same_v<T, double> ? static_cast<T>(w.clamp.low) : clamp_low;
  return raw;
}

template <class T>
void apply_weight(const Weight& w, const SequenceView<T>& seq, SequenceEffect<T> effect) {
  const auto num = seq.stream(w.pair.numerator), den = seq.stream(w.pair.denominator);
  const size_t n = effect.weights.size();
  const T cap = static_cast<T>(w.log_clamp);
  if (w.level == Level::token) {
    for (size_t t = 0; t < n; ++t) {
      const T x = seq.mask[t] ? num[t] - den[t] : T(0);
      effect.weights[t] = x > cap ? cap : x < -cap ? -cap : x;
    }
    exp_in_place(effect.weights);
    for (size_t t = 0; t < n; ++t) effect.weights[t] = limited(effect.weights[t], w);
    return;
  }
  double sum = 0.0, count = 0.0;
  for (size_t t = 0; t < n; ++t) {
    if (w.over == Positions::trained && !seq.mask[t]) continue;
    sum += static_cast<double>(num[t]) - static_cast<double>(den[t]);
    count += 1.0;
  }
  if (count == 0.0) return;
  const double x = w.level == Level::geometric ? sum / count : sum;
  const double raw = std::exp(std::min(std::max(x, -w.log_clamp), w.log_clamp));
  const T weight = static_cast<T>(limited(raw, w));
  for (size_t t = 0; t < n; ++t) effect.weights[t] = weight;
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
  return make_correction(
      std::move(name), formula_of(weight), {weight.pair.numerator, weight.pair.denominator},
      [weight](const auto& seq, auto effect) { apply_weight(weight, seq, effect); });
}

}  // namespace leeway
