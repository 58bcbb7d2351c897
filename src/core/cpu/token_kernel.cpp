// Vector code, compiled once per SIMD level and chosen at run time. It follows reference.cpp line
// by line; branches on the spec are the same for all tokens and cost next to nothing.
//
// Lanes of masked tokens are zeroed on load, so that whatever they hold is inert from there on.

#include "core/cpu/token_kernel.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "core/participation.h"
#include "core/quantities.h"
#include "leeway/error.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/cpu/token_kernel.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "hwy/contrib/math/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace leeway {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;
using M = hn::Mask<D>;

constexpr float kLargest = 3.402823466e38f;

HWY_INLINE V constant(float value) { return hn::Set(D(), value); }

constexpr float kFloatInfinity = std::numeric_limits<float>::infinity();
constexpr float kSumCap = static_cast<float>(kRatioSumCap);
constexpr int kFirstBin = (127 - 12) << 5;
constexpr size_t kBinBuffer = 1024;  // tokens whose bins are kept until they are counted
constexpr int kGeneral = -1;  // the loop that can do everything; others are a SurrogateKind each
constexpr int kMaxGates = 4, kMaxPenalties = 4;

// The spec as the inner loop reads it: float32 constants in one local object, so that the compiler
// knows that no store of a gradient can change them.
struct PlannedGate {
  Quantity quantity;
  SignRule sign;
  bool uses_r;  // its value is the spec's own ratio
  bool drops_penalty;
  int num, den;
  float low, high, log_clamp;
};
struct PlannedPenalty {
  PenaltyKind kind;
  PenaltyGate gate;
  bool times_ratio;
  int num, den;
  float coefficient, slope;  // slope: with the sign toward pi, 0 without gradient
};
struct Plan {
  explicit Plan(const LossSpec& spec, const TokenInputs& in);

  bool simple;  // neither weights, flags, penalties nor shaping: most of the loop falls away
  bool uses_ratio, token_ratio, clamps_log, is_mismatch_ratio, has_clip;
  bool has_rollout, has_ref, has_teacher;
  int ratio_den;
  float log_clamp, log_cap;
  SurrogateKind kind;
  float clip_low, clip_high, dual_clip, ratio_cap, tau_pos, tau_neg;
  bool by_ratio_alone;
  float adv_tau, teacher_tau;
  int teacher;
  bool sequence_mean, constant_one, times_mask;
  int gate_count = 0, penalty_count = 0;
  PlannedGate gates[kMaxGates];
  PlannedPenalty penalties[kMaxPenalties];
};

Plan::Plan(const LossSpec& spec, const TokenInputs& in) {
  auto f = [](double value) { return static_cast<float>(value); };
  auto has = [&](Stream s) { return in.streams[static_cast<int>(s)] != nullptr; };
  uses_ratio = uses_ratio_of(spec);
  token_ratio = spec.ratio.level == Level::token;
  clamps_log = spec.ratio.log_clamp < kInfinity || spec.ratio.log_cap < kInfinity;
  is_mismatch_ratio = uses_ratio && token_ratio && !clamps_log &&
                      spec.ratio.pair == Pair{Stream::pi, Stream::rollout};
  has_clip = leeway::has_clip(spec);
  has_rollout = has(Stream::rollout);
  has_ref = has(Stream::ref);
  has_teacher = has(Stream::teacher);
  ratio_den = static_cast<int>(spec.ratio.pair.denominator);
  log_clamp = f(spec.ratio.log_clamp);
  log_cap = f(spec.ratio.log_cap);
  kind = spec.surrogate.kind;
  clip_low = f(spec.surrogate.clip.low);
  clip_high = f(spec.surrogate.clip.high);
  dual_clip = f(spec.surrogate.dual_clip);
  ratio_cap = f(spec.surrogate.ratio_cap);
  tau_pos = f(spec.surrogate.tau_pos);
  tau_neg = f(spec.surrogate.tau_neg);
  by_ratio_alone = kind != SurrogateKind::log_prob && kind != SurrogateKind::detached_ratio;
  adv_tau = f(spec.shaping.adv_tau);
  teacher_tau = f(spec.shaping.teacher_tau);
  teacher = static_cast<int>(spec.shaping.teacher);
  sequence_mean = spec.shaping.sequence_mean;
  constant_one = spec.shaping.constant_one;
  times_mask = spec.shaping.times_mask && in.loss_mask != nullptr;
  for (const Gate& gate : spec.gates) {
    if (gate.level != Level::token || gate.scope == GateScope::mask || in.gates_in_flags) continue;
    LEEWAY_CHECK(gate_count < kMaxGates, "at most four token-level gates");
    gates[gate_count++] = {gate.quantity,
                           gate.sign,
                           gate.quantity == Quantity::ratio && uses_ratio && token_ratio &&
                               gate.pair == spec.ratio.pair &&
                               gate.log_clamp == spec.ratio.log_clamp &&
                               spec.ratio.log_cap == kInfinity,
                           gate.scope == GateScope::policy_and_penalty,
                           static_cast<int>(gate.pair.numerator),
                           static_cast<int>(gate.pair.denominator),
                           f(gate.keep.low),
                           f(gate.keep.high),
                           f(gate.log_clamp)};
  }
  for (const Penalty& p : spec.penalties) {
    LEEWAY_CHECK(penalty_count < kMaxPenalties, "at most four penalties");
    const double toward_pi =
        (p.pair.numerator == Stream::pi) - static_cast<double>(p.pair.denominator == Stream::pi);
    penalties[penalty_count++] = {p.kind,
                                  p.gate,
                                  p.times_ratio,
                                  static_cast<int>(p.pair.numerator),
                                  static_cast<int>(p.pair.denominator),
                                  f(p.coefficient),
                                  f(p.gradient ? p.coefficient * toward_pi : 0.0)};
  }
  simple = in.batch_weights == nullptr && in.weights == nullptr && in.flags == nullptr &&
           in.through == nullptr && penalty_count == 0 && teacher_tau == 0.0f && adv_tau == 1.0f &&
           !sequence_mean && !constant_one && !times_mask && !clamps_log && token_ratio;
}

// e^x; infinity above float32's range (which 89 is beyond: the exponent overflows by itself).
HWY_INLINE V exp_of(V x) { return hn::Exp(D(), hn::Min(x, constant(89.0f))); }

// e^x - 1 - x from r = e^x: a polynomial where the difference would cancel.
HWY_INLINE V k3_of(V x, V r) {
  const D d;
  V p = hn::Set(d, 1.0f / 5040.0f);
  p = hn::MulAdd(p, x, hn::Set(d, 1.0f / 720.0f));
  p = hn::MulAdd(p, x, hn::Set(d, 1.0f / 120.0f));
  p = hn::MulAdd(p, x, hn::Set(d, 1.0f / 24.0f));
  p = hn::MulAdd(p, x, hn::Set(d, 1.0f / 6.0f));
  p = hn::MulAdd(p, x, hn::Set(d, 0.5f));
  const V near = hn::Mul(hn::Mul(x, x), p);
  const V far = hn::Sub(hn::Sub(r, hn::Set(d, 1.0f)), x);
  return hn::IfThenElse(hn::Lt(hn::Abs(x), hn::Set(d, 0.25f)), near, far);
}

HWY_INLINE V sigmoid(V x) {
  const D d;
  const V one = hn::Set(d, 1.0f);
  return hn::Div(one, hn::Add(one, exp_of(hn::Neg(x))));
}

// The larger of KL(a || b) and KL(b || a) over {taken token, any other}. With x = log a - log b and
// D = log((1 - a) / (1 - b)) both are sums of two products, so one logarithm serves them.
HWY_INLINE V largest_binary_kl(V log_a, V log_b) {
  const D d;
  const V zero = hn::Zero(d), one = hn::Set(d, 1.0f);
  const V la = hn::Min(log_a, zero), lb = hn::Min(log_b, zero);
  const V a = exp_of(la), b = exp_of(lb);
  const V rest_a = hn::Neg(hn::Add(la, k3_of(la, a)));  // 1 - a, without cancellation near 1
  const V rest_b = hn::Neg(hn::Add(lb, k3_of(lb, b)));
  const M some_a = hn::Gt(rest_a, zero), some_b = hn::Gt(rest_b, zero);
  const V quotient = hn::IfThenElse(hn::And(some_a, some_b), hn::Div(rest_a, rest_b), one);
  const V log_rest = hn::Log(d, quotient);
  const V x = hn::Sub(log_a, log_b);
  const V ab = hn::MulAdd(a, x, hn::Mul(rest_a, log_rest));
  const V ba = hn::Neg(hn::MulAdd(b, x, hn::Mul(rest_b, log_rest)));
  // A certain token leaves nothing to the others; where only one side is certain they are
  // infinitely far apart.
  const M one_sided = hn::Or(hn::AndNot(some_a, some_b), hn::AndNot(some_b, some_a));
  return hn::IfThenElse(one_sided, hn::Inf(d), hn::Max(ab, ba));
}

HWY_INLINE V quantity_of(Quantity quantity, V num, V den, V x, V r) {
  const D d;
  switch (quantity) {
    case Quantity::ratio: return r;
    case Quantity::difference: return hn::Sub(exp_of(num), exp_of(den));
    case Quantity::k1: return x;
    case Quantity::k2: return hn::Mul(hn::Set(d, 0.5f), hn::Mul(x, x));
    case Quantity::k3: return k3_of(x, r);
    case Quantity::binary_kl: return largest_binary_kl(num, den);
    case Quantity::signed_binary_kl: {
      const V one = hn::Set(d, 1.0f), tiny = hn::Set(d, 1e-8f);
      const V p = exp_of(num), q = exp_of(den);
      const V rest = hn::Sub(one, q);
      const V odds = hn::Div(hn::Add(rest, tiny), hn::Add(hn::Sub(one, p), tiny));
      const V kl = hn::MulAdd(q, hn::Sub(den, num), hn::Mul(rest, hn::Log(d, odds)));
      return hn::IfThenElse(hn::Gt(num, den), kl, hn::Neg(kl));
    }
  }
  return r;
}

// Masks of `low` and `high` drops of one token-level gate.
HWY_INLINE void judge(const PlannedGate& gate, V value, V advantage, M& low, M& high) {
  const D d;
  const V zero = hn::Zero(d);
  low = hn::Lt(value, constant(gate.low));
  high = hn::Gt(value, constant(gate.high));
  if (gate.sign == SignRule::both) return;
  low = hn::And(low, gate.sign == SignRule::zero_takes_low ? hn::Le(advantage, zero)
                                                           : hn::Lt(advantage, zero));
  high = hn::And(high, hn::Gt(advantage, zero));
}

HWY_INLINE M flag_mask(hn::Vec<hn::Rebind<int32_t, D>> flags, int bit) {
  const hn::Rebind<int32_t, D> di;
  return hn::RebindMask(D(), hn::Ne(hn::And(flags, hn::Set(di, bit)), hn::Zero(di)));
}

struct Totals {
  V loss, kl, kl_positive, kl_negative, kl_dropped, abs_log_ratio, ratio, ratio_squared;
  V coefficient, coefficient_squared, penalty, weight, ref_kl, teacher_kl;
  V x_min, x_max, weight_max;
  uint64_t tokens, positive, negative, dropped, dropped_low, dropped_high, dropped_positive,
      dropped_negative, kept, clip_binding, clip_low, clip_high, clip_signed, clip_dual,
      weight_zero;
};

HWY_INLINE void count(uint64_t& total, M mask) { total += hn::CountTrue(D(), mask); }
HWY_INLINE void add(V& total, V value) { total = hn::Add(total, value); }
HWY_INLINE void add(V& total, M mask, V value) {
  total = hn::Add(total, hn::IfThenElseZero(mask, value));
}

// One vector of tokens, of which `rest` are left.
template <bool kMetrics, int kShape, bool kWhole>
HWY_INLINE void run_vector(const Plan& plan, const TokenInputs& in, const SequenceNumbers& seq,
                           size_t i, size_t rest, Totals& t, M& finite, uint16_t* bins) {
  constexpr bool kSimple = kShape != kGeneral;
  const SurrogateKind kind = kSimple ? static_cast<SurrogateKind>(kShape) : plan.kind;
  const D d;
  const V zero = hn::Zero(d), one = hn::Set(d, 1.0f);
  // The last, partial vector goes through a buffer: reading past the end of a stream is not ours.
  auto load = [&](const float* from) HWY_ATTR {
    if (kWhole) return hn::LoadU(d, from + i);
    HWY_ALIGN float padded[HWY_MAX_BYTES / sizeof(float)] = {};
    std::memcpy(padded, from + i, rest * sizeof(float));
    return hn::Load(d, padded);
  };
  const hn::Rebind<uint8_t, D> du8;
  const hn::Rebind<int32_t, D> di32;
  auto load_bytes = [&](const uint8_t* from) HWY_ATTR {
    if (kWhole) return hn::PromoteTo(di32, hn::LoadU(du8, from + i));
    HWY_ALIGN uint8_t padded[HWY_MAX_BYTES] = {};
    std::memcpy(padded, from + i, rest);
    return hn::PromoteTo(di32, hn::LoadU(du8, padded));
  };

  M m = kWhole ? hn::Eq(zero, zero) : hn::FirstN(d, rest);
  if (in.mask != nullptr) {
    m = hn::And(m, hn::RebindMask(d, hn::Ne(load_bytes(in.mask), hn::Zero(di32))));
  }
  V batch_weight = one;
  if (!kSimple && in.batch_weights != nullptr) {
    const V raw = load(in.batch_weights);
    m = hn::And(m, hn::Ne(raw, zero));
    batch_weight = hn::IfThenElseZero(m, raw);
  }
  auto stream = [&](int s) HWY_ATTR { return hn::IfThenElseZero(m, load(in.streams[s])); };
  constexpr int kPi = static_cast<int>(Stream::pi), kRollout = static_cast<int>(Stream::rollout);

  // Advantage.
  const V A_raw = hn::IfThenElseZero(m, load(in.advantages));
  const V pi = stream(kPi);
  V sanity = hn::Add(pi, A_raw);
  V A = A_raw;
  if constexpr (!kSimple) {
    sanity = hn::Add(sanity, batch_weight);
    if (plan.sequence_mean) A = hn::Set(d, seq.mean_advantage);
    A = plan.constant_one ? one : hn::Mul(A, constant(plan.adv_tau));
    if (plan.teacher_tau != 0.0f) {
      const V teacher = stream(plan.teacher);
      sanity = hn::Add(sanity, teacher);
      A = hn::MulAdd(constant(plan.teacher_tau), hn::Sub(teacher, pi), A);
    }
    if (plan.times_mask) {
      A = hn::IfThenElseZero(hn::RebindMask(d, hn::Ne(load_bytes(in.loss_mask), hn::Zero(di32))),
                             A);
    }
  }

  // The spec's ratio.
  V raw_x = zero, r = one;
  M live = m;
  if (kSimple ? kind != SurrogateKind::log_prob : plan.uses_ratio) {
    if (kSimple || plan.token_ratio) {
      // Every ratio of a surrogate has pi above the line.
      const V den = stream(plan.ratio_den);
      raw_x = hn::Sub(pi, den);
      sanity = hn::Add(sanity, den);
    } else {
      raw_x = hn::IfThenElseZero(m, hn::Set(d, seq.log_ratio));
    }
    V x = raw_x;
    if (!kSimple && plan.clamps_log) {
      x = hn::Clamp(x, constant(-plan.log_clamp), constant(plan.log_clamp));
      x = hn::Min(x, constant(plan.log_cap));
      live = hn::Eq(x, raw_x);
    }
    r = exp_of(x);
  }

  // Gates.
  const M none = hn::Lt(one, zero);
  M low = none, high = none, dropped = none, penalty_dropped = none, selected = none;
  if (!kSimple && in.flags != nullptr) {
    const auto flags = load_bytes(in.flags);
    dropped = flag_mask(flags, kPolicyDropped);
    penalty_dropped = flag_mask(flags, kPenaltyDropped);
    low = flag_mask(flags, kBelow);
    high = flag_mask(flags, kAbove);
    selected = flag_mask(flags, kSelected);
  }
  for (int g = 0; g < plan.gate_count; ++g) {
    const PlannedGate& gate = plan.gates[g];
    V value = r;
    if (!gate.uses_r) {
      const V num = stream(gate.num), den = stream(gate.den);
      const V gx =
          hn::Clamp(hn::Sub(num, den), constant(-gate.log_clamp), constant(gate.log_clamp));
      const bool needs_exp = gate.quantity == Quantity::ratio || gate.quantity == Quantity::k3;
      value = quantity_of(gate.quantity, num, den, gx, needs_exp ? exp_of(gx) : one);
      sanity = hn::Add(sanity, hn::Add(num, den));
    }
    M gate_low, gate_high;
    judge(gate, value, A_raw, gate_low, gate_high);
    low = hn::Or(low, gate_low);
    high = hn::Or(high, gate_high);
    const M out = hn::Or(gate_low, gate_high);
    dropped = hn::Or(dropped, out);
    if (gate.drops_penalty) penalty_dropped = hn::Or(penalty_dropped, out);
  }
  low = hn::And(low, m);
  high = hn::And(high, m);
  dropped = hn::And(dropped, m);

  // Surrogate.
  V loss = zero, by_ratio = zero, by_log_prob = zero, coefficient = r;
  M cut = none, binding = none, dual = none;
  switch (kind) {
    case SurrogateKind::ratio: loss = by_ratio = hn::Neg(hn::Mul(A, r)); break;
    case SurrogateKind::log_prob:
      loss = hn::Neg(hn::Mul(A, pi));
      by_log_prob = hn::Neg(A);
      coefficient = one;
      break;
    case SurrogateKind::clipped: {
      const V lo = constant(plan.clip_low), hi = constant(plan.clip_high),
              cap = constant(plan.ratio_cap);
      const V minus_A = hn::Neg(A);
      const M inside_band = hn::And(hn::Ge(r, lo), hn::Le(r, hi));
      const V full = hn::Mul(minus_A, r);
      const V u = hn::Mul(minus_A, hn::Min(r, cap));
      const V du = hn::IfThenElseZero(hn::Le(r, cap), full);
      const V v = hn::Mul(minus_A, hn::Clamp(r, lo, hi));
      const V dv = hn::IfThenElseZero(inside_band, full);
      binding = hn::Gt(v, u);
      loss = hn::Max(u, v);
      by_ratio = hn::IfThenElse(
          binding, dv,
          hn::IfThenElse(hn::Gt(u, v), du, hn::Mul(hn::Set(d, 0.5f), hn::Add(du, dv))));
      if (plan.dual_clip < kFloatInfinity) {
        const V bound = hn::Mul(minus_A, constant(plan.dual_clip));
        dual = hn::And(hn::And(hn::Lt(A, zero), hn::Gt(loss, bound)),
                       hn::Gt(r, constant(plan.dual_clip)));
        loss = hn::IfThenElse(dual, bound, loss);
        by_ratio = hn::IfThenZeroElse(dual, by_ratio);
      }
      cut = hn::And(hn::Ne(A, zero), hn::Eq(by_ratio, zero));
      break;
    }
    case SurrogateKind::detached_ratio:
      coefficient = hn::Clamp(r, constant(plan.clip_low), constant(plan.clip_high));
      by_log_prob = hn::Neg(hn::Mul(coefficient, A));
      loss = hn::Mul(by_log_prob, pi);
      break;
    case SurrogateKind::soft_gate: {
      const V tau =
          hn::IfThenElse(hn::Gt(A_raw, zero), constant(plan.tau_pos), constant(plan.tau_neg));
      const V sigma = sigmoid(hn::Mul(tau, hn::Sub(r, one)));
      const V four = hn::Set(d, 4.0f);
      loss = hn::Neg(hn::Mul(A, hn::Div(hn::Mul(four, sigma), tau)));
      coefficient = hn::Mul(hn::Mul(four, hn::Mul(sigma, hn::Sub(one, sigma))), r);
      by_ratio = hn::Neg(hn::Mul(A, coefficient));
      break;
    }
  }
  M kept = hn::AndNot(hn::Or(dropped, cut), m);
  if (!kSimple && plan.by_ratio_alone && plan.clamps_log) {
    kept = hn::AndNot(hn::AndNot(live, hn::Ne(A, zero)), kept);
  }

  // Corrections' weight.
  M paid = hn::AndNot(dropped, m);
  V weight = one;
  M zero_weight = none;
  if (!kSimple && in.weights != nullptr) {
    weight = hn::IfThenElseZero(m, load(in.weights));
    zero_weight = hn::And(m, hn::Eq(weight, zero));
    paid = hn::AndNot(zero_weight, paid);
    kept = hn::AndNot(zero_weight, kept);
    loss = hn::Mul(loss, weight);
    by_ratio = hn::Mul(by_ratio, weight);
    by_log_prob = hn::Mul(by_log_prob, weight);
    coefficient = hn::Mul(coefficient, weight);
  }
  loss = hn::IfThenElseZero(paid, loss);
  by_ratio = hn::IfThenElseZero(kSimple ? paid : hn::And(paid, live), by_ratio);
  by_log_prob = hn::IfThenElseZero(paid, by_log_prob);
  coefficient = hn::IfThenElseZero(kept, coefficient);

  // Penalties.
  V penalty = zero;
  for (int k = 0; !kSimple && k < plan.penalty_count; ++k) {
    const PlannedPenalty& p = plan.penalties[k];
    const V num = stream(p.num), den = stream(p.den);
    const V px = hn::Sub(num, den);
    sanity = hn::Add(sanity, hn::Add(num, den));
    M open = hn::AndNot(penalty_dropped, m);
    if (p.gate == PenaltyGate::kept) open = hn::AndNot(dropped, open);
    if (p.gate == PenaltyGate::nonzero_advantage) open = hn::And(open, hn::Ne(A_raw, zero));
    if (p.gate == PenaltyGate::selected) open = hn::And(open, selected);
    V value = px, slope = one;
    switch (p.kind) {
      case PenaltyKind::k1: break;
      case PenaltyKind::k2:
        value = hn::Mul(hn::Set(d, 0.5f), hn::Mul(px, px));
        slope = px;
        break;
      case PenaltyKind::k3: {
        const V e = exp_of(px);
        value = k3_of(px, e);
        slope = hn::Add(value, px);
        break;
      }
      case PenaltyKind::squared_log:
        value = hn::Mul(px, px);
        slope = hn::Add(px, px);
        break;
      case PenaltyKind::absolute:
        value = hn::Abs(px);
        slope = hn::IfThenElseZero(hn::Ne(px, zero), hn::CopySign(one, px));
        break;
    }
    value = hn::Mul(value, constant(p.coefficient));
    slope = hn::Mul(slope, constant(p.slope));
    if (p.times_ratio) {
      value = hn::Mul(value, r);
      slope = hn::Mul(slope, r);
      by_ratio = hn::Add(by_ratio, hn::IfThenElseZero(hn::And(open, live), value));
    }
    penalty = hn::Add(penalty, hn::IfThenElseZero(open, value));
    by_log_prob = hn::Add(by_log_prob, hn::IfThenElseZero(open, slope));
  }

  // Gradient. An input, a ratio or a gradient that is not finite shows in `sanity`.
  const V scale = hn::Set(d, seq.scale);
  V grad;
  V routed = zero;
  if constexpr (kSimple) {
    grad = hn::Mul(scale, hn::Add(by_log_prob, by_ratio));
    add(t.loss, loss);
  } else {
    const V c = hn::Mul(batch_weight, scale);
    grad = hn::Mul(c, by_log_prob);
    routed = hn::Mul(c, by_ratio);
    if (in.through == nullptr) grad = hn::Add(grad, routed);
    add(t.loss, hn::Mul(batch_weight, hn::Add(loss, penalty)));
    sanity = hn::Add(sanity, routed);
  }
  sanity = hn::Add(sanity, grad);
  finite = hn::And(finite, hn::Le(hn::Abs(hn::IfThenElseZero(m, sanity)), hn::Set(d, kLargest)));
  auto store = [&](V value, float* to) HWY_ATTR {
    if (kWhole) {
      hn::StoreU(value, d, to + i);
    } else {
      HWY_ALIGN float padded[HWY_MAX_BYTES / sizeof(float)];
      hn::Store(value, d, padded);
      std::memcpy(to + i, padded, rest * sizeof(float));
    }
  };
  store(grad, in.grad);
  if (!kSimple && in.through != nullptr) store(routed, in.through);

  if constexpr (!kMetrics) return;
  const M positive = hn::Gt(A_raw, zero), negative = hn::Lt(A_raw, zero);
  const M gone = hn::Or(dropped, zero_weight);
  count(t.tokens, m);
  count(t.positive, positive);
  count(t.negative, negative);
  count(t.dropped, gone);
  count(t.dropped_low, low);
  count(t.dropped_high, high);
  count(t.dropped_positive, hn::And(gone, positive));
  count(t.dropped_negative, hn::And(gone, negative));
  count(t.kept, kept);
  const V capped = hn::Min(coefficient, constant(kSumCap));
  add(t.coefficient, capped);
  t.coefficient_squared = hn::MulAdd(capped, capped, t.coefficient_squared);
  if (!kSimple && plan.penalty_count > 0) add(t.penalty, penalty);
  if (!kSimple && in.weights != nullptr) {
    count(t.weight_zero, zero_weight);
    add(t.weight, m, weight);
    t.weight_max = hn::IfThenElse(m, hn::Max(t.weight_max, weight), t.weight_max);
  }
  if (plan.has_rollout) {
    V mx = raw_x, mr = r;
    if (!plan.is_mismatch_ratio) {
      mx = hn::Sub(pi, stream(kRollout));
      mr = exp_of(mx);
    }
    const V kl = k3_of(mx, mr);
    add(t.kl, kl);  // masked lanes hold x = 0
    add(t.kl_positive, positive, kl);
    add(t.kl_negative, negative, kl);
    add(t.kl_dropped, gone, kl);
    add(t.abs_log_ratio, hn::Abs(mx));
    const V mr_capped = hn::Min(mr, constant(kSumCap));  // masked lanes hold 1, subtracted later
    add(t.ratio, mr_capped);
    t.ratio_squared = hn::MulAdd(mr_capped, mr_capped, t.ratio_squared);
    t.x_min = hn::IfThenElse(m, hn::Min(t.x_min, mx), t.x_min);
    t.x_max = hn::IfThenElse(m, hn::Max(t.x_max, mx), t.x_max);
    // Masked lanes hold ratio 1 and are counted with the rest; run_tokens takes them out again.
    const V lowest = constant(0x1p-12f);  // what NaN of an unread stream falls to, too
    const V limited =
        hn::IfThenElse(hn::Ge(mr, lowest), hn::Min(mr, constant(0x1.ffffp11f)), lowest);
    const hn::Rebind<uint16_t, D> du16;
    const auto bin =
        hn::Sub(hn::ShiftRight<18>(hn::BitCast(di32, limited)), hn::Set(di32, kFirstBin));
    hn::StoreU(hn::DemoteTo(du16, bin), du16, bins);
  }
  if (plan.has_clip) {
    const M clip_low = hn::And(m, hn::Lt(r, constant(plan.clip_low)));
    const M clip_high = hn::And(m, hn::Gt(r, constant(plan.clip_high)));
    count(t.clip_binding, hn::And(m, binding));
    count(t.clip_low, clip_low);
    count(t.clip_high, clip_high);
    count(t.clip_signed, hn::Or(hn::And(clip_low, negative), hn::And(clip_high, positive)));
    count(t.clip_dual, hn::And(m, dual));
  }
  if (plan.has_ref) {
    const V rx = hn::Sub(stream(static_cast<int>(Stream::ref)), pi);
    add(t.ref_kl, m, k3_of(rx, exp_of(rx)));
  }
  if (plan.has_teacher) {
    add(t.teacher_kl, hn::Sub(stream(static_cast<int>(Stream::teacher)), pi));
  }
}

// Four histograms in turn; the bins come from memory, so that the loop is loads and stores only.
HWY_INLINE void count_bins(const uint16_t* bins, size_t n, KernelHistogram& histogram) {
  size_t k = 0;
  for (; k + 4 <= n; k += 4) {
    ++histogram.bins[0][bins[k]];
    ++histogram.bins[1][bins[k + 1]];
    ++histogram.bins[2][bins[k + 2]];
    ++histogram.bins[3][bins[k + 3]];
  }
  for (; k < n; ++k) ++histogram.bins[0][bins[k]];
}

double sum_lanes(V value) { return hn::GetLane(hn::SumOfLanes(D(), value)); }

template <bool kMetrics, int kShape>
void run_tokens(const Plan& planned, const TokenInputs& inputs, const SequenceNumbers& seq,
                size_t n, KernelSums& sums, KernelHistogram* histogram) {
  const D d;
  const size_t lanes = hn::Lanes(d);
  const V zero = hn::Zero(d);
  Totals t{};
  for (V* v : {&t.loss, &t.kl, &t.kl_positive, &t.kl_negative, &t.kl_dropped, &t.abs_log_ratio,
               &t.ratio, &t.ratio_squared, &t.coefficient, &t.coefficient_squared, &t.penalty,
               &t.weight, &t.ref_kl, &t.teacher_kl}) {
    *v = zero;
  }
  t.x_min = hn::Inf(d);
  t.x_max = hn::Neg(hn::Inf(d));
  t.weight_max = hn::Neg(hn::Inf(d));
  M finite = hn::Eq(zero, zero);
  // Local copies: no store through a pointer can change them.
  const Plan plan = planned;
  const TokenInputs in = inputs;
  uint16_t bins[kBinBuffer + HWY_MAX_BYTES / sizeof(float)];
  for (size_t begin = 0; begin < n; begin += kBinBuffer) {
    const size_t end = std::min(n, begin + kBinBuffer);
    size_t i = begin;
    for (; i + lanes <= end; i += lanes) {
      run_vector<kMetrics, kShape, true>(plan, in, seq, i, lanes, t, finite, bins + (i - begin));
    }
    if (i < end) {
      run_vector<kMetrics, kShape, false>(plan, in, seq, i, end - i, t, finite, bins + (i - begin));
      i = end;
    }
    if constexpr (kMetrics) {
      if (plan.has_rollout) count_bins(bins, i - begin, *histogram);
    }
  }
  sums.loss += static_cast<double>(seq.scale) * sum_lanes(t.loss);
  sums.not_finite = sums.not_finite || !hn::AllTrue(d, finite);
  if constexpr (!kMetrics) return;
  if (plan.has_rollout) {
    histogram->bins[0][(127 << 5) - kFirstBin] -= static_cast<uint32_t>(n - t.tokens);
  }
  auto add_sum = [&](Slot slot, double value) { sums.slots[static_cast<int>(slot)] += value; };
  auto add_count = [&](Slot slot, uint64_t value) { add_sum(slot, static_cast<double>(value)); };
  add_sum(Slot::kl, sum_lanes(t.kl));
  add_sum(Slot::kl_positive, sum_lanes(t.kl_positive));
  add_sum(Slot::kl_negative, sum_lanes(t.kl_negative));
  add_sum(Slot::kl_dropped, sum_lanes(t.kl_dropped));
  add_sum(Slot::abs_log_ratio, sum_lanes(t.abs_log_ratio));
  // Masked lanes, and those of the last vector that do not exist, added a ratio of 1 each.
  const size_t lanes_run = (n + lanes - 1) / lanes * lanes;
  const double idle = plan.has_rollout ? static_cast<double>(lanes_run - t.tokens) : 0.0;
  add_sum(Slot::ratio, sum_lanes(t.ratio) - idle);
  add_sum(Slot::ratio_squared, sum_lanes(t.ratio_squared) - idle);
  add_sum(Slot::coefficient, sum_lanes(t.coefficient));
  add_sum(Slot::coefficient_squared, sum_lanes(t.coefficient_squared));
  add_sum(Slot::penalty, sum_lanes(t.penalty));
  add_sum(Slot::weight,
          in.weights != nullptr ? sum_lanes(t.weight) : static_cast<double>(t.tokens));
  add_sum(Slot::ref_kl, sum_lanes(t.ref_kl));
  add_sum(Slot::teacher_kl, sum_lanes(t.teacher_kl));
  add_count(Slot::tokens, t.tokens);
  add_count(Slot::positive_tokens, t.positive);
  add_count(Slot::negative_tokens, t.negative);
  add_count(Slot::dropped, t.dropped);
  add_count(Slot::dropped_low, t.dropped_low);
  add_count(Slot::dropped_high, t.dropped_high);
  add_count(Slot::dropped_positive, t.dropped_positive);
  add_count(Slot::dropped_negative, t.dropped_negative);
  add_count(Slot::kept, t.kept);
  add_count(Slot::clip_binding, t.clip_binding);
  add_count(Slot::clip_low, t.clip_low);
  add_count(Slot::clip_high, t.clip_high);
  add_count(Slot::clip_signed, t.clip_signed);
  add_count(Slot::clip_dual, t.clip_dual);
  add_count(Slot::weight_zero, t.weight_zero);
  if (t.tokens == 0) return;
  auto raise = [&](Slot slot, double value) {
    double& held = sums.slots[static_cast<int>(slot)];
    held = is_minimum(slot) ? std::min(held, value) : std::max(held, value);
  };
  if (plan.has_rollout) {
    // k3 grows away from 0 on both sides: its largest value is at one of the extremes.
    const double low = hn::GetLane(hn::MinOfLanes(d, t.x_min));
    const double high = hn::GetLane(hn::MaxOfLanes(d, t.x_max));
    raise(Slot::ratio_min, std::exp(low));
    raise(Slot::ratio_max, std::exp(high));
    raise(Slot::kl_max, std::max(k3(low), k3(high)));
  }
  raise(Slot::weight_max,
        in.weights != nullptr ? hn::GetLane(hn::MaxOfLanes(d, t.weight_max)) : 1.0);
}

// Plain specs have a loop of their own per surrogate.
template <bool kMetrics>
void run_shape(const Plan& plan, const TokenInputs& in, const SequenceNumbers& seq, size_t n,
               KernelSums& sums, KernelHistogram* histogram) {
  auto run = [&](auto shape) {
    run_tokens<kMetrics, decltype(shape)::value>(plan, in, seq, n, sums, histogram);
  };
  if (!plan.simple) return run(std::integral_constant<int, kGeneral>());
  switch (plan.kind) {
    case SurrogateKind::ratio: return run(std::integral_constant<int, 0>());
    case SurrogateKind::log_prob: return run(std::integral_constant<int, 1>());
    case SurrogateKind::clipped: return run(std::integral_constant<int, 2>());
    case SurrogateKind::detached_ratio: return run(std::integral_constant<int, 3>());
    case SurrogateKind::soft_gate: return run(std::integral_constant<int, 4>());
  }
}

void token_kernel(const LossSpec& spec, const TokenInputs& in, const SequenceNumbers& seq, size_t n,
                  KernelSums& sums, KernelHistogram* histogram) {
  const Plan plan(spec, in);
  if (histogram != nullptr) {
    run_shape<true>(plan, in, seq, n, sums, histogram);
  } else {
    run_shape<false>(plan, in, seq, n, sums, nullptr);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace leeway
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace leeway {

HWY_EXPORT(token_kernel);

void run_token_kernel(const LossSpec& spec, const TokenInputs& in, const SequenceNumbers& sequence,
                      size_t count, KernelSums& sums, KernelHistogram* histogram) {
  HWY_DYNAMIC_DISPATCH(token_kernel)(spec, in, sequence, count, sums, histogram);
}

}  // namespace leeway
#endif
