// Pieces of a spec as inner loops read them, for CPUs and GPUs alike.
#pragma once

#include <cstdint>

#include "leeway/loss.h"

namespace leeway {

// Bits of a token's flags: what is decided before its own arithmetic.
enum TokenFlag : uint8_t {
  kPolicyDropped = 1,
  kPenaltyDropped = 2,
  kBelow = 4,
  kAbove = 8,
  kSelected = 16,
  kNarrowed = 32,  // a gate of scope `mask` took the token out
};

struct PlannedPenalty {
  PenaltyKind kind;
  PenaltyGate gate;
  bool times_ratio;
  int num, den;
  float coefficient, slope;  // slope: with the sign toward pi, 0 without gradient
};

inline PlannedPenalty plan_penalty(const Penalty& p) {
  const double toward_pi =
      (p.pair.numerator == Stream::pi) - static_cast<double>(p.pair.denominator == Stream::pi);
  return {p.kind,
          p.gate,
          p.times_ratio,
          static_cast<int>(p.pair.numerator),
          static_cast<int>(p.pair.denominator),
          static_cast<float>(p.coefficient),
          static_cast<float>(p.gradient ? p.coefficient * toward_pi : 0.0)};
}

}  // namespace leeway
