// Which parts of a loss have no effect because two of the policies it compares are the same.

#include <fmt/format.h>

#include <algorithm>

#include "trainer/trainer.h"

namespace leeway {
namespace {

// Pairs of streams that are equal at every update.
struct Equalities {
  bool pi_is_prox, pi_is_rollout, prox_is_rollout;

  bool equal(const Pair& pair) const {
    const auto is = [&](Stream a, Stream b) {
      return (pair.numerator == a && pair.denominator == b) ||
             (pair.numerator == b && pair.denominator == a);
    };
    return (pi_is_prox && is(Stream::pi, Stream::prox)) ||
           (pi_is_rollout && is(Stream::pi, Stream::rollout)) ||
           (prox_is_rollout && is(Stream::prox, Stream::rollout));
  }
};

std::string ratio_text(const Pair& pair) {
  return fmt::format("{}/{}", name_of(pair.numerator), name_of(pair.denominator));
}

}  // namespace

std::vector<std::string> inert_parts(const LossSpec& spec, const TrainerTable& table,
                                     bool on_policy) {
  const bool one_step = optimizer_steps_per_batch(table) == 1;
  const bool never = table.prox_forward == ProxForward::never;
  Equalities same{};
  same.pi_is_rollout = on_policy && one_step;
  same.pi_is_prox = one_step && (!never || same.pi_is_rollout);
  same.prox_is_rollout = never || on_policy;

  const auto reason = [&](const Pair& pair) {
    const bool has_pi = pair.numerator == Stream::pi || pair.denominator == Stream::pi;
    const bool has_prox = pair.numerator == Stream::prox || pair.denominator == Stream::prox;
    if (has_pi && has_prox) return "one optimizer step follows each batch";
    return has_prox && never ? "prox_forward = \"never\" uses rollout as prox"
                             : "rollouts come from the weights that train on them";
  };
  std::vector<std::string> parts = spec.warnings;
  const auto note = [&](const std::string& part, const Pair& pair) {
    parts.push_back(fmt::format("{} is always 1 ({}): {}", ratio_text(pair), reason(pair), part));
  };
  const bool bounded = spec.surrogate.clip.low > -kInfinity || spec.surrogate.clip.high < kInfinity;
  const bool clips = spec.surrogate.kind == SurrogateKind::clipped ||
                     (spec.surrogate.kind == SurrogateKind::detached_ratio && bounded);
  if (same.equal(spec.ratio.pair)) {
    if (clips || spec.ratio.signed_log_clip) note("the clip cannot act", spec.ratio.pair);
    if (spec.surrogate.kind == SurrogateKind::soft_gate) {
      note("the soft gate is the same for all tokens", spec.ratio.pair);
    }
  }
  for (const Gate& gate : spec.gates) {
    if (same.equal(gate.pair)) note("the mask drops no token", gate.pair);
  }
  const Pair aged{Stream::prox, Stream::rollout};
  if (spec.m2_threshold && same.equal(aged)) note("M2PO's mask drops no token", aged);
  for (const Correction& correction : spec.corrections) {
    if (correction.weight && same.equal(correction.weight->pair)) {
      note(fmt::format("the weight {} changes nothing", correction.name), correction.weight->pair);
    }
  }
  for (const Penalty& penalty : spec.penalties) {
    if (same.equal(penalty.pair))
      note("the penalty on it is 0, and so is its gradient", penalty.pair);
  }
  return parts;
}

}  // namespace leeway
