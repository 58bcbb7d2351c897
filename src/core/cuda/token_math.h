// One token's loss, gradient and verdicts in float32 scalar code. It follows reference.cpp line by
// line and is the same text on the host, where tests hold it against the reference, and on the
// device, where the kernels run it.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/cuda/loss_plan.h"
#include "core/planned.h"

#ifdef __CUDACC__
#define LEEWAY_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define LEEWAY_HOST_DEVICE inline
#endif

namespace leeway::cuda {

// A token that takes part. Streams the batch lacks hold anything.
struct TokenIn {
  float streams[kStreamCount];
  float advantage;
  float batch_weight = 1.0f;
  bool in_mask = true;  // of the batch, for advantages times mask
  // Of its sequence, or of preparation.
  float scale = 1.0f, log_ratio = 0.0f, mean_advantage = 0.0f;
  bool prepared = false;  // gates and weights are in the two below
  uint8_t flags = 0;
  float weight = 1.0f;
};

struct TokenOut {
  bool trained = true;  // false: a gate of scope `mask` took it out
  bool gone = false;    // dropped by a gate, a mask or a zero weight
  bool kept = false;    // its policy term carries gradient
  bool below = false, above = false;
  bool clip_binding = false, dual_clipped = false;
  float ratio = 1.0f, weight = 1.0f, penalty = 0.0f, coefficient = 0.0f;
  float loss = 0.0f;     // batch weight times (policy + penalties), before the scale
  float grad = 0.0f;     // d loss / d log pi, without what goes through the mean
  float through = 0.0f;  // d loss / d the sequence's log ratio
  float sanity = 0.0f;   // finite if every number that counts is
};

// e^x; infinity above float32's range.
LEEWAY_HOST_DEVICE float exp_of(float x) { return expf(x); }

// e^x - 1 - x from r = e^x: a polynomial where the difference would cancel.
LEEWAY_HOST_DEVICE float k3_of(float x, float r) {
  if (!(fabsf(x) < 0.25f)) return r - 1.0f - x;
  float p = 1.0f / 5040.0f;
  p = p * x + 1.0f / 720.0f;
  p = p * x + 1.0f / 120.0f;
  p = p * x + 1.0f / 24.0f;
  p = p * x + 1.0f / 6.0f;
  p = p * x + 0.5f;
  return x * x * p;
}

LEEWAY_HOST_DEVICE float clamp(float x, float low, float high) {
  return fminf(fmaxf(x, low), high);
}

// The larger of KL(a || b) and KL(b || a) over {taken token, any other}; `ratio` is a / b.
LEEWAY_HOST_DEVICE float largest_binary_kl(float log_a, float log_b, float ratio) {
  const float la = fminf(log_a, 0.0f), lb = fminf(log_b, 0.0f);
  const float b = exp_of(lb), a = fminf(b * ratio, 1.0f);
  const float rest_a = -(la + k3_of(la, a));  // 1 - a, without cancellation near 1
  const float rest_b = -(lb + k3_of(lb, b));
  const bool some_a = rest_a > 0.0f, some_b = rest_b > 0.0f;
  if (some_a != some_b) return INFINITY;  // one is certain: infinitely far apart
  const float log_rest = some_a ? logf(rest_a / rest_b) : 0.0f;
  const float x = log_a - log_b;
  return fmaxf(a * x + rest_a * log_rest, -(b * x + rest_b * log_rest));
}

// One token's value of a gate quantity; x is the (clamped) log ratio.
LEEWAY_HOST_DEVICE float quantity_of(Quantity quantity, float num, float den, float x) {
  switch (quantity) {
    case Quantity::ratio: return exp_of(x);
    case Quantity::difference: return exp_of(num) - exp_of(den);
    case Quantity::k1: return x;
    case Quantity::k2: return 0.5f * x * x;
    case Quantity::k3: return k3_of(x, exp_of(x));
    case Quantity::binary_kl: return largest_binary_kl(num, den, exp_of(x));
    case Quantity::signed_binary_kl: {
      const float p = exp_of(num), q = exp_of(den), tiny = 1e-8f;
      const float kl = q * (den - num) + (1.0f - q) * logf((1.0f - q + tiny) / (1.0f - p + tiny));
      return num > den ? kl : -kl;
    }
  }
  return 0.0f;
}

LEEWAY_HOST_DEVICE void judge(const PlannedGate& gate, float value, float advantage, bool& low,
                              bool& high) {
  const bool low_applies =
      gate.sign == SignRule::both ||
      (gate.sign == SignRule::zero_takes_low ? advantage <= 0.0f : advantage < 0.0f);
  const bool high_applies = gate.sign == SignRule::both || advantage > 0.0f;
  low = low_applies && value < gate.low;
  high = high_applies && value > gate.high;
}

LEEWAY_HOST_DEVICE float gate_value(const PlannedGate& gate, float num, float den) {
  return quantity_of(gate.quantity, num, den, clamp(num - den, -gate.log_clamp, gate.log_clamp));
}

// A detached weight from the log ratio at its level.
LEEWAY_HOST_DEVICE float weight_of(const PlannedWeight& w, float x) {
  const float raw = exp_of(clamp(x, -w.log_clamp, w.log_clamp));
  if (raw < w.keep_low || raw > w.keep_high) return 0.0f;
  return clamp(raw, w.clamp_low, w.clamp_high);
}

// A token's log ratio as it enters its sequence's, and its slope (GMPO clips on the advantage's
// side).
LEEWAY_HOST_DEVICE float statistic_of(const LossPlan& plan, float num, float den, float advantage,
                                      float& slope) {
  const float x = num - den;
  slope = 1.0f;
  if (!plan.clips_by_sign) return x;
  const float clipped = clamp(x, plan.sign_clip_low, plan.sign_clip_high);
  const float chosen = advantage > 0.0f   ? fminf(x, clipped)
                       : advantage < 0.0f ? fmaxf(x, clipped)
                                          : 0.0f;
  slope = advantage != 0.0f && chosen == x ? 1.0f : 0.0f;
  return chosen;
}

// The surrogate of one token and its derivatives: by the log ratio and directly by log pi.
struct SurrogateOut {
  float loss = 0.0f, by_ratio = 0.0f, by_log_prob = 0.0f, coefficient = 0.0f;
  bool cut = false, clip_binding = false, dual_clipped = false;
};

LEEWAY_HOST_DEVICE SurrogateOut surrogate_of(const LossPlan& plan, float r, float A,
                                             float raw_advantage, float pi) {
  SurrogateOut out;
  switch (plan.kind) {
    case SurrogateKind::ratio:
      out.loss = out.by_ratio = -A * r;
      out.coefficient = r;
      break;
    case SurrogateKind::log_prob:
      out.loss = -A * pi;
      out.by_log_prob = -A;
      out.coefficient = 1.0f;
      break;
    case SurrogateKind::clipped: {
      const bool inside = r >= plan.clip_low && r <= plan.clip_high;
      const bool capped = r > plan.ratio_cap;
      const float u = -A * (capped ? plan.ratio_cap : r), du = capped ? 0.0f : -A * r;
      const float v = -A * clamp(r, plan.clip_low, plan.clip_high), dv = inside ? -A * r : 0.0f;
      out.loss = fmaxf(u, v);
      out.by_ratio = u > v ? du : v > u ? dv : 0.5f * (du + dv);
      out.clip_binding = v > u;
      if (A < 0.0f && r > plan.dual_clip && out.loss > -A * plan.dual_clip) {
        out.loss = -A * plan.dual_clip;
        out.by_ratio = 0.0f;
        out.dual_clipped = true;
      }
      out.cut = A != 0.0f && out.by_ratio == 0.0f;
      out.coefficient = out.cut ? 0.0f : r;
      break;
    }
    case SurrogateKind::detached_ratio:
      out.coefficient = clamp(r, plan.clip_low, plan.clip_high);
      out.by_log_prob = -out.coefficient * A;
      out.loss = out.by_log_prob * pi;
      break;
    case SurrogateKind::soft_gate: {
      const float tau = raw_advantage > 0.0f ? plan.tau_pos : plan.tau_neg;
      const float sigma = 1.0f / (1.0f + exp_of(-tau * (r - 1.0f)));
      out.loss = -A * (4.0f / tau) * sigma;
      out.coefficient = 4.0f * sigma * (1.0f - sigma) * r;
      out.by_ratio = -A * out.coefficient;
      break;
    }
  }
  return out;
}

LEEWAY_HOST_DEVICE float penalty_value(PenaltyKind kind, float x, float& slope) {
  switch (kind) {
    case PenaltyKind::k1: slope = 1.0f; return x;
    case PenaltyKind::k2: slope = x; return 0.5f * x * x;
    case PenaltyKind::k3: {
      const float value = k3_of(x, exp_of(x));
      slope = value + x;
      return value;
    }
    case PenaltyKind::squared_log: slope = 2.0f * x; return x * x;
    case PenaltyKind::absolute: slope = x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : 0.0f; return fabsf(x);
  }
  slope = 0.0f;
  return 0.0f;
}

LEEWAY_HOST_DEVICE TokenOut evaluate_token(const LossPlan& plan, const TokenIn& in) {
  TokenOut out;
  const float pi = in.streams[static_cast<int>(Stream::pi)], raw_advantage = in.advantage;
  float sanity = pi + raw_advantage + in.batch_weight;
  bool dropped = false, penalty_dropped = false, selected = false;
  float weight = in.weight;
  if (in.prepared) {
    dropped = in.flags & kPolicyDropped;
    penalty_dropped = in.flags & kPenaltyDropped;
    selected = in.flags & kSelected;
    out.below = in.flags & kBelow;
    out.above = in.flags & kAbove;
  } else {
    for (int g = 0; g < plan.gate_count; ++g) {
      const PlannedGate& gate = plan.gates[g];
      const float num = in.streams[gate.num], den = in.streams[gate.den];
      bool low, high;
      judge(gate, gate_value(gate, num, den), raw_advantage, low, high);
      if (gate.scope == GateScope::mask) {
        out.trained = out.trained && !(low || high);
        continue;
      }
      sanity += num + den;
      out.below |= low;
      out.above |= high;
      dropped |= low || high;
      penalty_dropped |= (low || high) && gate.scope == GateScope::policy_and_penalty;
    }
    if (!out.trained) return out;
    for (int w = 0; w < plan.weight_count; ++w) {
      const float num = in.streams[plan.weights[w].num], den = in.streams[plan.weights[w].den];
      sanity += num + den;
      weight *= weight_of(plan.weights[w], num - den);
    }
  }

  // Advantage.
  float A = plan.sequence_mean ? in.mean_advantage : raw_advantage;
  A = plan.constant_one ? 1.0f : A * plan.adv_tau;
  if (plan.teacher_tau != 0.0f) {
    const float teacher = in.streams[plan.teacher];
    sanity += teacher;
    A += plan.teacher_tau * (teacher - pi);
  }
  if (plan.times_mask && !in.in_mask) A = 0.0f;

  // The spec's ratio.
  float r = 1.0f;
  bool live = true;
  if (plan.uses_ratio) {
    float x = in.log_ratio;
    if (plan.token_ratio) {
      const float num = in.streams[plan.ratio_num], den = in.streams[plan.ratio_den];
      x = num - den;
      sanity += num + den;
    }
    const float limited = fminf(clamp(x, -plan.log_clamp, plan.log_clamp), plan.log_cap);
    live = limited == x;
    r = exp_of(limited);
  }

  const float sign_of = plan.sequence_mean ? in.mean_advantage : raw_advantage;
  const SurrogateOut policy = surrogate_of(plan, r, A, sign_of, pi);
  const bool paid = !dropped && weight != 0.0f;
  const bool dead = plan.by_ratio_alone && A != 0.0f && !live;
  out.ratio = r;
  out.weight = weight;
  out.gone = !paid;
  out.clip_binding = policy.clip_binding;
  out.dual_clipped = policy.dual_clipped;
  out.kept = paid && !policy.cut && !dead;
  float loss = 0.0f, by_ratio = 0.0f, by_log_prob = 0.0f;
  if (paid) {
    loss = weight * policy.loss;
    by_ratio = live ? weight * policy.by_ratio : 0.0f;
    by_log_prob = weight * policy.by_log_prob;
    if (out.kept) out.coefficient = weight * policy.coefficient;
  }

  for (int k = 0; k < plan.penalty_count; ++k) {
    const PlannedPenalty& p = plan.penalties[k];
    const float num = in.streams[p.num], den = in.streams[p.den];
    sanity += num + den;
    const bool open = p.gate == PenaltyGate::all                 ? true
                      : p.gate == PenaltyGate::kept              ? !dropped
                      : p.gate == PenaltyGate::nonzero_advantage ? raw_advantage != 0.0f
                                                                 : selected;
    if (!open || penalty_dropped) continue;
    float slope;
    float value = p.coefficient * penalty_value(p.kind, num - den, slope);
    slope *= p.slope;
    if (p.times_ratio) {
      value *= r;
      slope *= r;
      if (live) by_ratio += value;
    }
    out.penalty += value;
    by_log_prob += slope;
  }

  const float c = in.scale * in.batch_weight;
  out.loss = in.batch_weight * (loss + out.penalty);
  out.grad = c * by_log_prob;
  if (plan.through_mean) {
    out.through = c * by_ratio;
  } else {
    out.grad += c * by_ratio;
  }
  out.sanity = sanity + out.loss + out.grad + out.through;
  return out;
}

}  // namespace leeway::cuda
