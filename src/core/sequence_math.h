// Scalar parts of the two passes over a sequence that the reference and the SIMD implementation
// share: the surrogate, the sequence's log ratio and the padding that some sources count.
#pragma once

#include <cmath>
#include <utility>

#include "core/participation.h"
#include "core/quantities.h"
#include "leeway/loss.h"

namespace leeway {

// The surrogate of one token and its derivatives: by the log ratio (`by_ratio`) and directly by
// log pi (`by_log_prob`).
struct SurrogateValue {
  double loss = 0.0, by_ratio = 0.0, by_log_prob = 0.0;
  double coefficient = 0.0;
  bool cut = false, clip_binding = false, dual_clipped = false;
};

inline SurrogateValue surrogate_of(const Surrogate& s, double r, double A, double raw_A,
                                   double log_pi) {
  SurrogateValue out;
  switch (s.kind) {
    case SurrogateKind::ratio:
      out.loss = -A * r;
      out.by_ratio = -A * r;
      out.coefficient = r;
      break;
    case SurrogateKind::log_prob:
      out.loss = -A * log_pi;
      out.by_log_prob = -A;
      out.coefficient = 1.0;
      break;
    case SurrogateKind::clipped: {
      const bool inside = !above(r, s.clip.high) && !below(r, s.clip.low);
      const bool capped = above(r, s.ratio_cap);
      const double u = -A * (capped ? s.ratio_cap : r), du = capped ? 0.0 : -A * r;
      const double v = -A * limit(r, s.clip), dv = inside ? -A * r : 0.0;
      out.loss = std::max(u, v);
      out.by_ratio = u > v ? du : v > u ? dv : 0.5 * (du + dv);
      out.clip_binding = v > u;
      if (A < 0 && out.loss > -A * s.dual_clip && above(r, s.dual_clip)) {
        out.loss = -A * s.dual_clip;
        out.by_ratio = 0.0;
        out.dual_clipped = true;
      }
      out.cut = A != 0 && out.by_ratio == 0.0;
      out.coefficient = out.cut ? 0.0 : r;
      break;
    }
    case SurrogateKind::detached_ratio: {
      const double clipped = limit(r, s.clip);
      out.loss = -clipped * A * log_pi;
      out.by_log_prob = -clipped * A;
      out.coefficient = clipped;
      break;
    }
    case SurrogateKind::soft_gate: {
      const double tau = raw_A > 0 ? s.tau_pos : s.tau_neg;
      const double sigma = 1.0 / (1.0 + std::exp(-tau * (r - 1.0)));
      out.loss = -A * (4.0 / tau) * sigma;
      out.by_ratio = -A * 4.0 * sigma * (1.0 - sigma) * r;
      out.coefficient = 4.0 * sigma * (1.0 - sigma) * r;
      break;
    }
  }
  return out;
}

// Whether position t of a sequence enters the sequence's ratio. `first` is its place in the batch.
template <class T>
bool in_statistic(const LossSpec& spec, const BatchView<T>& batch, const SequenceView<T>& seq,
                  size_t first, size_t t) {
  if (spec.ratio.over == Positions::all) return has_weight(batch, first + t);
  return spec.positions == Positions::all ? in_mask(batch, first + t) : seq.mask[t] != 0;
}

// A token's log ratio as it enters the sequence's, and its slope: GMPO clips it on the advantage's
// side, where the slope is 0.
inline std::pair<double, double> clipped_log_ratio(const LossSpec& spec, double num, double den,
                                                   double A) {
  const double x = num - den;
  if (!spec.ratio.signed_log_clip) return {x, 1.0};
  const Bounds& clip = *spec.ratio.signed_log_clip;
  const double clipped = std::min(std::max(x, clip.low), clip.high);
  const double chosen = A > 0 ? std::min(x, clipped) : A < 0 ? std::max(x, clipped) : 0.0;
  return {chosen, A != 0 && chosen == x ? 1.0 : 0.0};
}

// Loss and gradient by the sequence's log ratio of the positions up to the longest sequence, where
// a source pads with equal log-probabilities and the sequence's advantage, and counts them.
struct PaddingTerm {
  double loss = 0.0, by_ratio = 0.0;
};
template <class T>
PaddingTerm padding_of(const LossSpec& spec, const BatchView<T>& batch, int64_t s, double log_ratio,
                       double scale) {
  const size_t length = static_cast<size_t>(batch.offsets[s + 1]) - first_position(batch, s);
  if (spec.reduction.kind != ReductionKind::padded_length_mean || length == 0) return {};
  const double pads = longest_sequence(batch) - static_cast<double>(length);
  const double A =
      static_cast<double>(batch.advantages[static_cast<size_t>(batch.offsets[s + 1] - 1)]);
  const double r = spec.ratio.level == Level::token ? 1.0 : std::exp(log_ratio);
  const SurrogateValue pad = surrogate_of(spec.surrogate, r, A, A, 0.0);
  return {scale * pads * pad.loss, scale * pads * pad.by_ratio};
}

}  // namespace leeway
