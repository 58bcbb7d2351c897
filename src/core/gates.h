// Gates over one sequence, in scalar code: used by the reference for all gates, and by the SIMD
// implementation for what is decided once per sequence.
#pragma once

#include <cmath>
#include <vector>

#include "core/quantities.h"
#include "core/vector_math.h"
#include "leeway/loss.h"

namespace leeway {

inline double clamp_log(double x, double limit) { return std::min(std::max(x, -limit), limit); }

struct GateVerdict {
  bool below = false, above = false;
  bool dropped() const { return below || above; }
};

inline GateVerdict judge(const Gate& gate, double value, double advantage) {
  const bool low_applies = gate.sign == SignRule::both ||
                           (gate.sign == SignRule::zero_takes_low ? advantage <= 0 : advantage < 0);
  const bool high_applies = gate.sign == SignRule::both || advantage > 0;
  return {low_applies && below(value, gate.keep.low), high_applies && above(value, gate.keep.high)};
}

// The gate's value for a whole sequence: the aggregate of its level over the positions in the mask.
// The ratio aggregates in log space, exp comes last. Empty if the mask is.
template <class T>
std::optional<double> sequence_gate_value(const Gate& gate, const SequenceView<T>& seq) {
  const auto num = seq.stream(gate.pair.numerator), den = seq.stream(gate.pair.denominator);
  if (gate.quantity == Quantity::ratio && gate.log_clamp == kInfinity &&
      (gate.level == Level::geometric || gate.level == Level::sequence)) {
    const auto [sum, count] = log_ratio_sum(num, den, seq.mask);
    if (count == 0.0) return std::nullopt;
    return std::exp(gate.level == Level::geometric ? sum / count : sum);
  }
  double sum = 0.0, largest = -kInfinity, smallest = kInfinity, count = 0.0;
  for (size_t t = 0; t < seq.mask.size(); ++t) {
    if (!seq.mask[t]) continue;
    const double x =
        clamp_log(static_cast<double>(num[t]) - static_cast<double>(den[t]), gate.log_clamp);
    const double value =
        gate.quantity == Quantity::ratio ? x : quantity_value(gate.quantity, num[t], den[t], x);
    sum += value, count += 1.0;
    largest = std::max(largest, value), smallest = std::min(smallest, value);
  }
  if (count == 0.0) return std::nullopt;
  const double value = gate.level == Level::geometric  ? sum / count
                       : gate.level == Level::sequence ? sum
                       : gate.level == Level::max      ? largest
                                                       : smallest;
  return gate.quantity == Quantity::ratio ? std::exp(value) : value;
}

// Calls `each(position, verdict)` for every position in the sequence's mask that may be dropped.
template <class T, class Each>
void apply_gate(const Gate& gate, const SequenceView<T>& seq, Each each) {
  const auto num = seq.stream(gate.pair.numerator), den = seq.stream(gate.pair.denominator);
  std::optional<double> whole;
  if (gate.level != Level::token) {
    whole = sequence_gate_value(gate, seq);
    if (!whole) return;
  }
  if (whole && !judge(gate, *whole, 1.0).dropped() && !judge(gate, *whole, -1.0).dropped()) {
    return;  // the whole sequence is inside at either sign, and so at zero
  }
  for (size_t t = 0; t < seq.mask.size(); ++t) {
    if (!seq.mask[t]) continue;
    const double x = static_cast<double>(num[t]) - static_cast<double>(den[t]);
    const double value =
        whole ? *whole
              : quantity_value(gate.quantity, num[t], den[t], clamp_log(x, gate.log_clamp));
    each(t, judge(gate, value, static_cast<double>(seq.advantages[t])));
  }
}

}  // namespace leeway
