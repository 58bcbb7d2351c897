// Scalar formulas shared by the reference, the corrections and the metrics.
#pragma once

#include <algorithm>
#include <cmath>

#include "leeway/loss.h"

namespace leeway {

// Bounds are compared in float32: a value equal to a bound in the precision of recorded logprobs is
// kept, although the same comparison in double might go either way.
inline bool above(double value, double bound) {
  return static_cast<float>(value) > static_cast<float>(bound);
}
inline bool below(double value, double bound) {
  return static_cast<float>(value) < static_cast<float>(bound);
}

inline double limit(double value, const Bounds& bounds) {
  const double raised = below(value, bounds.low) ? bounds.low : value;
  return above(raised, bounds.high) ? bounds.high : raised;
}

// e^x - 1 - x, without cancellation near zero.
inline double k3(double x) { return std::expm1(x) - x; }

// log(1 - e^x) for x <= 0; -infinity at 0. Logprobs above 0 count as certainty.
inline double log_one_minus_exp(double x) {
  if (x >= 0.0) return -kInfinity;
  return x > -0.6931471805599453 ? std::log(-std::expm1(x)) : std::log1p(-std::exp(x));
}

// KL(a || b) over the outcomes {taken token, any other}, from the log-probabilities of the first.
inline double binary_kl(double log_a, double log_b) {
  const double a = std::min(1.0, std::exp(log_a));
  const double rest = -std::expm1(std::min(0.0, log_a));
  double kl = a > 0.0 ? a * (log_a - log_b) : 0.0;
  if (rest > 0.0) kl += rest * (log_one_minus_exp(log_a) - log_one_minus_exp(log_b));
  return kl;
}

// One token's value of a gate quantity. `num` and `den` are log-probabilities, x the (clamped)
// difference of them.
inline double quantity_value(Quantity quantity, double num, double den, double x) {
  switch (quantity) {
    case Quantity::ratio: return std::exp(x);
    case Quantity::difference: return std::exp(num) - std::exp(den);
    case Quantity::k1: return x;
    case Quantity::k2: return 0.5 * x * x;
    case Quantity::k3: return k3(x);
    case Quantity::binary_kl: return std::max(binary_kl(num, den), binary_kl(den, num));
    case Quantity::signed_binary_kl: {
      // The 1e-8 keeps a certain token finite, as in the source this quantity comes from.
      const double p = std::exp(num), q = std::exp(den);
      const double kl = q * (den - num) + (1 - q) * std::log((1 - q + 1e-8) / (1 - p + 1e-8));
      return num > den ? kl : -kl;
    }
  }
  return 0.0;
}

}  // namespace leeway
