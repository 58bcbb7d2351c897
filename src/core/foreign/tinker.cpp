// Tinker's documented server losses: raw sums over all positions, the mask expressed by A = 0.

#include "core/foreign/foreign.h"

namespace leeway {

std::optional<LossSpec> tinker_spec(std::string_view loss, ForeignSettings& s) {
  LossSpec spec;
  spec.ratio.pair = kPiRollout;
  spec.positions = Positions::all;
  spec.shaping.times_mask = true;
  spec.reduction.kind = ReductionKind::sum;
  if (loss == "importance_sampling") {
    spec.surrogate.kind = SurrogateKind::ratio;
  } else if (loss == "ppo") {
    spec.surrogate = {
        .kind = SurrogateKind::clipped,
        .clip = {s.number("clip_low_threshold", 0.8), s.number("clip_high_threshold", 1.2)}};
  } else if (loss == "cispo") {
    spec.surrogate = {
        .kind = SurrogateKind::detached_ratio,
        .clip = {s.number("clip_low_threshold", 0.0), s.number("clip_high_threshold", 4.0)}};
  } else if (loss == "dro") {
    // The quadratic term has no mask: it acts on prompt tokens too.
    spec.surrogate.kind = SurrogateKind::log_prob;
    spec.penalties.push_back(
        {.kind = PenaltyKind::k2, .pair = kPiRollout, .coefficient = s.number("beta", 0.05)});
  } else {
    return std::nullopt;
  }
  return spec;
}

}  // namespace leeway
