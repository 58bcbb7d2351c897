// The float32 formulas for one token at a time: the text that GPUs run, and that tests run on the
// host.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/float32/host_device.h"
#include "core/float32/numbers.h"
#include "core/float32/plan.h"
#include "leeway/metrics.h"

namespace leeway::float32 {

template <class V>
struct MaskType {
  using Type = bool;
};
template <class V>
using MaskOf = typename MaskType<V>::Type;

template <class V>
LEEWAY_HOST_DEVICE float constant(float value) {
  return value;
}
template <class V>
LEEWAY_HOST_DEVICE bool nothing() {
  return false;
}
LEEWAY_HOST_DEVICE float neg(float a) { return -a; }
LEEWAY_HOST_DEVICE float abs_of(float a) { return fabsf(a); }
LEEWAY_HOST_DEVICE float min_of(float a, float b) { return fminf(a, b); }
LEEWAY_HOST_DEVICE float max_of(float a, float b) { return fmaxf(a, b); }
LEEWAY_HOST_DEVICE float clamped(float x, float low, float high) {
  return fminf(fmaxf(x, low), high);
}
LEEWAY_HOST_DEVICE float mul_add(float a, float b, float c) { return a * b + c; }
LEEWAY_HOST_DEVICE float exp_of(float x) { return expf(x); }
LEEWAY_HOST_DEVICE float log_of(float x) { return logf(x); }
LEEWAY_HOST_DEVICE float sign_or_zero(float x) { return x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : 0.0f; }
LEEWAY_HOST_DEVICE bool less(float a, float b) { return a < b; }
LEEWAY_HOST_DEVICE bool greater(float a, float b) { return a > b; }
LEEWAY_HOST_DEVICE bool at_most(float a, float b) { return a <= b; }
LEEWAY_HOST_DEVICE bool at_least(float a, float b) { return a >= b; }
LEEWAY_HOST_DEVICE bool equal(float a, float b) { return a == b; }
LEEWAY_HOST_DEVICE bool differ(float a, float b) { return a != b; }
LEEWAY_HOST_DEVICE float select(bool mask, float a, float b) { return mask ? a : b; }
LEEWAY_HOST_DEVICE float where(bool mask, float a) { return mask ? a : 0.0f; }
LEEWAY_HOST_DEVICE bool both(bool a, bool b) { return a && b; }
LEEWAY_HOST_DEVICE bool either(bool a, bool b) { return a || b; }
LEEWAY_HOST_DEVICE bool without(bool a, bool b) { return a && !b; }

#define LEEWAY_FORMULA LEEWAY_HOST_DEVICE
#include "core/float32/token_formula-inl.h"
#undef LEEWAY_FORMULA

// A token that takes part. Streams the batch lacks hold anything.
struct TokenIn {
  using Number = float;

  float streams[kStreamCount];
  float advantage;
  float weight_in_batch = 1.0f;
  bool in_mask = true;  // of the batch, for advantages times mask
  // Of its sequence, or of preparation.
  float sequence_scale = 1.0f, sequence_log_ratio = 0.0f, sequence_advantage = 0.0f;
  bool prepared = false;  // gates and weights are in the two below
  uint8_t token_flags = 0;
  float correction_weight = 1.0f;

  // What evaluate_token() asks of a token.
  LEEWAY_HOST_DEVICE bool trained() const { return true; }
  LEEWAY_HOST_DEVICE float stream(int k) const { return streams[k]; }
  LEEWAY_HOST_DEVICE float pi() const { return streams[static_cast<int>(Stream::pi)]; }
  LEEWAY_HOST_DEVICE float raw_advantage() const { return advantage; }
  LEEWAY_HOST_DEVICE float mean_advantage() const { return sequence_advantage; }
  LEEWAY_HOST_DEVICE float batch_weight() const { return weight_in_batch; }
  LEEWAY_HOST_DEVICE bool in_batch_mask() const { return in_mask; }
  LEEWAY_HOST_DEVICE float log_ratio() const { return sequence_log_ratio; }
  LEEWAY_HOST_DEVICE float scale() const { return sequence_scale; }
  LEEWAY_HOST_DEVICE bool gates_in_flags() const { return prepared; }
  LEEWAY_HOST_DEVICE bool has_flags() const { return prepared; }
  LEEWAY_HOST_DEVICE uint8_t flags() const { return token_flags; }
  LEEWAY_HOST_DEVICE bool flagged(uint8_t flags, int bit) const { return (flags & bit) != 0; }
  LEEWAY_HOST_DEVICE bool has_weight() const { return true; }
  LEEWAY_HOST_DEVICE float weight() const { return correction_weight; }
};

// One token's value of a gate quantity from its pair.
LEEWAY_HOST_DEVICE float quantity_of_pair(const PlannedGate& gate, float num, float den, float x) {
  return quantity_of(gate.quantity, num, den, x, gate.needs_exp ? exp_of(x) : 1.0f);
}
LEEWAY_HOST_DEVICE float gate_value(const PlannedGate& gate, float num, float den) {
  return quantity_of_pair(gate, num, den, clamped(num - den, -gate.log_clamp, gate.log_clamp));
}

// Whether gates of scope `mask` leave a token in the batch.
LEEWAY_HOST_DEVICE bool passes_mask_gates(const LossPlan& plan, const TokenIn& in) {
  for (int g = plan.token_gates; g < plan.gate_count; ++g) {
    const PlannedGate& gate = plan.gates[g];
    const float value = gate_value(gate, in.stream(gate.num), in.stream(gate.den));
    const GateSides<float> sides = judge(gate, value, in.advantage);
    if (sides.low || sides.high) return false;
  }
  return true;
}

// A token with everything that is its own to decide: where nothing is prepared, gates of scope
// `mask` and the corrections' weights come from its streams.
template <class Rules = TokenRules>
LEEWAY_HOST_DEVICE TokenOut<float> evaluate_alone(const LossPlan& plan, TokenIn& in) {
  if (!in.prepared && !passes_mask_gates(plan, in)) {
    TokenOut<float> out{};
    return out;
  }
  // A bound can turn NaN into a finite weight: min(NaN, cap) is the cap.
  float read = 0.0f;
  for (int w = 0; w < plan.weight_count; ++w) {
    const float num = in.stream(plan.weights[w].num), den = in.stream(plan.weights[w].den);
    read += num + den;
    if (!in.prepared) in.correction_weight *= weight_of(plan.weights[w], num - den);
  }
  TokenOut<float> out = evaluate_token<AnyPlan<Rules>>(plan, in);
  out.sanity += read + out.loss;
  return out;
}

// A token's log ratio as it enters its sequence's, and its slope (GMPO clips on the advantage's
// side).
LEEWAY_HOST_DEVICE float statistic_of(const LossPlan& plan, float num, float den, float advantage,
                                      float& slope) {
  const float x = num - den;
  slope = 1.0f;
  if (!plan.clips_by_sign) return x;
  const float limited = clamped(x, plan.sign_clip_low, plan.sign_clip_high);
  const float chosen = advantage > 0.0f   ? fminf(x, limited)
                       : advantage < 0.0f ? fmaxf(x, limited)
                                          : 0.0f;
  slope = advantage != 0.0f && chosen == x ? 1.0f : 0.0f;
  return chosen;
}

// See leeway::ratio_bin.
LEEWAY_HOST_DEVICE int bin_of(float ratio) {
  const float limited = binned_ratio(ratio);
#ifdef __CUDA_ARCH__
  return (__float_as_int(limited) >> 18) - kFirstRatioBin;
#else
  int bits;
  __builtin_memcpy(&bits, &limited, sizeof bits);
  return (bits >> 18) - kFirstRatioBin;
#endif
}

}  // namespace leeway::float32
