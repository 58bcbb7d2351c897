// Metric sums of the tokens that one thread has seen, one at a time: the table of
// token_formula-inl.h driven by scalars.
#pragma once

#include "core/float32/scalar.h"
#include "core/float32/sequence_math.h"
#include "leeway/metrics.h"

namespace leeway::float32 {

// What the table asks of a token.
struct TokenFacts {
  using Number = float;

  const LossPlan& plan;
  const LossBatch& batch;
  const TokenIn& in;
  const TokenOut<float>& out;
  Mismatch<float> mismatch;

  LEEWAY_HOST_DEVICE bool trained() const { return true; }
  LEEWAY_HOST_DEVICE bool positive() const { return in.advantage > 0.0f; }
  LEEWAY_HOST_DEVICE bool negative() const { return in.advantage < 0.0f; }
  LEEWAY_HOST_DEVICE bool gone() const { return out.gone; }
  LEEWAY_HOST_DEVICE bool kept() const { return out.kept; }
  LEEWAY_HOST_DEVICE bool below() const { return out.below; }
  LEEWAY_HOST_DEVICE bool above() const { return out.above; }
  LEEWAY_HOST_DEVICE bool has_clip() const { return plan.has_clip; }
  LEEWAY_HOST_DEVICE bool clip_low() const { return out.ratio < plan.clip_low; }
  LEEWAY_HOST_DEVICE bool clip_high() const { return out.ratio > plan.clip_high; }
  LEEWAY_HOST_DEVICE bool clip_binding() const { return out.clip_binding; }
  LEEWAY_HOST_DEVICE bool dual_clipped() const { return out.dual_clipped; }
  LEEWAY_HOST_DEVICE bool has_weight() const { return true; }
  LEEWAY_HOST_DEVICE bool zero_weight() const { return out.zero_weight; }
  LEEWAY_HOST_DEVICE float weight() const { return out.weight; }
  LEEWAY_HOST_DEVICE float coefficient() const { return out.coefficient; }
  LEEWAY_HOST_DEVICE float mismatch_log() const { return mismatch.log; }
  LEEWAY_HOST_DEVICE float mismatch_ratio() const { return mismatch.ratio; }
  LEEWAY_HOST_DEVICE bool has_penalty() const { return plan.penalty_count > 0; }
  LEEWAY_HOST_DEVICE float penalty() const { return out.penalty; }
  LEEWAY_HOST_DEVICE bool has_ref() const { return has(Stream::ref); }
  LEEWAY_HOST_DEVICE float ref_log() const { return from_pi(Stream::ref); }
  LEEWAY_HOST_DEVICE bool has_teacher() const { return has(Stream::teacher); }
  LEEWAY_HOST_DEVICE float teacher_log() const { return from_pi(Stream::teacher); }

 private:
  LEEWAY_HOST_DEVICE bool has(Stream stream) const {
    return batch.streams[static_cast<int>(stream)] != nullptr;
  }
  LEEWAY_HOST_DEVICE float from_pi(Stream stream) const {
    return in.stream(static_cast<int>(stream)) - in.pi();
  }
};

// kSlots: the slots of leeway/metrics.h, and more where rules bring sums of their own. Indices are
// constants once everything is inlined, so that the arrays are registers on a GPU.
template <class Rules = TokenRules, int kSlots = kSlotCount>
struct TokenSums {
  static constexpr int kFirstExtreme = static_cast<int>(Slot::first_extreme);

  double loss = 0.0;  // scaled
  bool not_finite = false;
  uint32_t counts[kSlots] = {};
  double sums[kSlots] = {};
  float extremes[kSlotCount - kFirstExtreme] = {INFINITY,  -INFINITY, -INFINITY,
                                                -INFINITY, INFINITY,  -INFINITY};

  LEEWAY_HOST_DEVICE void count(Slot slot, bool mask) { counts[static_cast<int>(slot)] += mask; }
  LEEWAY_HOST_DEVICE void sum(Slot slot, float value) { sums[static_cast<int>(slot)] += value; }
  LEEWAY_HOST_DEVICE void sum_squares(Slot slot, float value) {
    sums[static_cast<int>(slot)] += static_cast<double>(value) * value;
  }
  LEEWAY_HOST_DEVICE void smallest(Slot slot, bool, float value) {
    float& held = extremes[static_cast<int>(slot) - kFirstExtreme];
    held = fminf(held, value);
  }
  LEEWAY_HOST_DEVICE void largest(Slot slot, bool, float value) {
    float& held = extremes[static_cast<int>(slot) - kFirstExtreme];
    held = fmaxf(held, value);
  }

  // Adds a trained token; returns the bin its mismatch ratio falls into, -1 without rollouts.
  LEEWAY_HOST_DEVICE int add(const LossPlan& plan, const LossBatch& batch, int64_t i,
                             const TokenIn& in, const TokenOut<float>& out) {
    loss += static_cast<double>(in.scale()) * out.loss;
    not_finite |= !(fabsf(out.sanity) <= kLargestFloat);
    const bool has_rollout = batch.streams[static_cast<int>(Stream::rollout)] != nullptr;
    TokenFacts facts{plan, batch, in, out, {}};
    if (has_rollout) {
      facts.mismatch = mismatch_of(plan, in, out);
      sum_mismatch(facts, *this);
    }
    count_tokens(facts, *this);
    sum_coefficients(facts, *this);
    sum_others(facts, *this);
    Rules::sum_more(facts, *this);
    if (batch.versions != nullptr) {
      const float version = static_cast<float>(batch.versions[i]);
      smallest(Slot::version_min, true, version);
      largest(Slot::version_max, true, version);
    }
    return has_rollout ? bin_of(facts.mismatch.ratio) : -1;
  }

  // What threads join of a slot, which is a count, a sum or an extreme. `sequences` and
  // `sequences_dropped` stay 0: a token alone cannot tell.
  LEEWAY_HOST_DEVICE double slot(int k) const {
    if (is_extreme(static_cast<Slot>(k))) return extremes[k - kFirstExtreme];
    return counts[k] + sums[k];
  }
};

}  // namespace leeway::float32
