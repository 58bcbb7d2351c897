// Vector code, compiled once per SIMD level and chosen at run time. It follows reference.cpp line
// by line; branches on the spec are the same for all tokens and cost next to nothing.
//
// Lanes of masked tokens are zeroed on load, so that whatever they hold is inert from there on.

#include "core/cpu/token_kernel.h"

#include "core/participation.h"

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

HWY_INLINE V constant(double value) { return hn::Set(D(), static_cast<float>(value)); }

// e^x; infinity above float32's range.
HWY_INLINE V exp_of(V x) {
  const D d;
  const V top = hn::Set(d, 88.7228f);
  const V e = hn::Exp(d, hn::Min(x, top));
  return hn::IfThenElse(hn::Gt(x, top), hn::Inf(d), e);
}

// e^x - 1 - x from r = e^x: a polynomial where the difference would cancel.
HWY_INLINE V k3_of(V x, V r) {
  const D d;
  V p = hn::Set(d, 1.0f / 362880.0f);
  p = hn::MulAdd(p, x, hn::Set(d, 1.0f / 40320.0f));
  p = hn::MulAdd(p, x, hn::Set(d, 1.0f / 5040.0f));
  p = hn::MulAdd(p, x, hn::Set(d, 1.0f / 720.0f));
  p = hn::MulAdd(p, x, hn::Set(d, 1.0f / 120.0f));
  p = hn::MulAdd(p, x, hn::Set(d, 1.0f / 24.0f));
  p = hn::MulAdd(p, x, hn::Set(d, 1.0f / 6.0f));
  p = hn::MulAdd(p, x, hn::Set(d, 0.5f));
  const V near = hn::Mul(hn::Mul(x, x), p);
  const V far = hn::Sub(hn::Sub(r, hn::Set(d, 1.0f)), x);
  return hn::IfThenElse(hn::Lt(hn::Abs(x), hn::Set(d, 0.5f)), near, far);
}

HWY_INLINE V sigmoid(V x) {
  const D d;
  const V one = hn::Set(d, 1.0f);
  return hn::Div(one, hn::Add(one, exp_of(hn::Neg(x))));
}

// log(1 - e^x) for x <= 0.
HWY_INLINE V log_one_minus_exp(V x) {
  const D d;
  const V capped = hn::Min(x, hn::Zero(d));
  const V far = hn::Log1p(d, hn::Neg(exp_of(capped)));
  const V near = hn::Log(d, hn::Max(hn::Neg(hn::Expm1(d, capped)), hn::Set(d, 1e-38f)));
  return hn::IfThenElse(hn::Gt(capped, hn::Set(d, -0.6931472f)), near, far);
}

// KL(a || b) over {taken token, any other}.
HWY_INLINE V binary_kl(V log_a, V log_b, V rest_a, V rest_b, V log_rest_a, V log_rest_b) {
  const D d;
  const V a = hn::Min(exp_of(log_a), hn::Set(d, 1.0f));
  V kl = hn::Mul(a, hn::Sub(log_a, log_b));
  // A certain token leaves nothing for the others: 0 log 0 = 0, and b certain where a is not is
  // infinitely far.
  const V other = hn::Mul(rest_a, hn::Sub(log_rest_a, log_rest_b));
  const M some = hn::Gt(rest_a, hn::Zero(d));
  const M impossible = hn::And(some, hn::Le(rest_b, hn::Zero(d)));
  kl = hn::Add(kl, hn::IfThenElseZero(some, other));
  return hn::IfThenElse(impossible, hn::Inf(d), kl);
}

HWY_INLINE V quantity_of(Quantity quantity, V num, V den, V x, V r) {
  const D d;
  switch (quantity) {
    case Quantity::ratio: return r;
    case Quantity::difference: return hn::Sub(exp_of(num), exp_of(den));
    case Quantity::k1: return x;
    case Quantity::k2: return hn::Mul(hn::Set(d, 0.5f), hn::Mul(x, x));
    case Quantity::k3: return k3_of(x, r);
    case Quantity::binary_kl: {
      const V zero = hn::Zero(d);
      const V rest_a = hn::Neg(hn::Expm1(d, hn::Min(num, zero)));
      const V rest_b = hn::Neg(hn::Expm1(d, hn::Min(den, zero)));
      const V log_a = log_one_minus_exp(num), log_b = log_one_minus_exp(den);
      return hn::Max(binary_kl(num, den, rest_a, rest_b, log_a, log_b),
                     binary_kl(den, num, rest_b, rest_a, log_b, log_a));
    }
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
HWY_INLINE void judge(const Gate& gate, V value, V advantage, M& low, M& high) {
  const D d;
  const V zero = hn::Zero(d);
  low = hn::Lt(value, constant(gate.keep.low));
  high = hn::Gt(value, constant(gate.keep.high));
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
  V ratio_min, ratio_max, kl_max, weight_max;
  uint64_t tokens, positive, negative, dropped, dropped_low, dropped_high, dropped_positive,
      dropped_negative, kept, clip_binding, clip_low, clip_high, clip_signed, clip_dual,
      weight_zero;
};

HWY_INLINE void count(uint64_t& total, M mask) { total += hn::CountTrue(D(), mask); }
HWY_INLINE void add(V& total, V value) { total = hn::Add(total, value); }
HWY_INLINE void add(V& total, M mask, V value) {
  total = hn::Add(total, hn::IfThenElseZero(mask, value));
}

// One vector of tokens. `inside` marks the lanes that exist.
template <bool kMetrics>
HWY_INLINE void run_vector(const LossSpec& spec, const TokenInputs& in, const SequenceNumbers& seq,
                           size_t i, M inside, bool whole, Totals& t, M& finite,
                           KernelHistogram* histogram) {
  const D d;
  const V zero = hn::Zero(d), one = hn::Set(d, 1.0f);
  auto load = [&](const float* from) HWY_ATTR {
    return whole ? hn::LoadU(d, from + i) : hn::MaskedLoad(inside, d, from + i);
  };
  const hn::Rebind<uint8_t, D> du8;
  const hn::Rebind<int32_t, D> di32;
  auto load_bytes = [&](const uint8_t* from) HWY_ATTR {
    if (whole) return hn::PromoteTo(di32, hn::LoadU(du8, from + i));
    HWY_ALIGN uint8_t bytes[HWY_MAX_BYTES] = {};
    HWY_ALIGN float lanes[HWY_MAX_BYTES / sizeof(float)];
    hn::Store(hn::IfThenElseZero(inside, hn::Set(d, 1.0f)), d, lanes);
    for (size_t k = 0; k < hn::Lanes(d); ++k)
      bytes[k] = lanes[k] != 0.0f ? from[i + k] : uint8_t{0};
    return hn::PromoteTo(di32, hn::LoadU(du8, bytes));
  };

  M m = inside;
  if (in.mask != nullptr) {
    m = hn::And(m, hn::RebindMask(d, hn::Ne(load_bytes(in.mask), hn::Zero(di32))));
  }
  V batch_weight = one;
  if (in.batch_weights != nullptr) {
    const V raw = load(in.batch_weights);
    m = hn::And(m, hn::Ne(raw, zero));
    batch_weight = hn::IfThenElseZero(m, raw);
  }
  auto stream = [&](Stream s) HWY_ATTR {
    return hn::IfThenElseZero(m, load(in.streams[static_cast<int>(s)]));
  };

  // Advantage.
  V A_raw = hn::IfThenElseZero(m, load(in.advantages));
  const V pi = stream(Stream::pi);
  V sanity = hn::Add(hn::Add(pi, A_raw), batch_weight);
  V A = spec.shaping.sequence_mean ? hn::Set(d, seq.mean_advantage) : A_raw;
  A = spec.shaping.constant_one ? one : hn::Mul(A, constant(spec.shaping.adv_tau));
  if (spec.shaping.teacher_tau != 0.0) {
    const V teacher = stream(spec.shaping.teacher);
    sanity = hn::Add(sanity, teacher);
    A = hn::MulAdd(constant(spec.shaping.teacher_tau), hn::Sub(teacher, pi), A);
  }
  if (spec.shaping.times_mask && in.loss_mask != nullptr) {
    A = hn::IfThenElseZero(hn::RebindMask(d, hn::Ne(load_bytes(in.loss_mask), hn::Zero(di32))), A);
  }

  // Ratios: the spec's own and, for metrics, pi/rollout.
  const bool uses_ratio = uses_ratio_of(spec);
  const bool has_rollout = in.streams[static_cast<int>(Stream::rollout)] != nullptr;
  V x = zero, raw_x = zero, r = one;
  M live = m;
  if (uses_ratio) {
    if (spec.ratio.level == Level::token) {
      const V num = stream(spec.ratio.pair.numerator), den = stream(spec.ratio.pair.denominator);
      raw_x = hn::Sub(num, den);
      sanity = hn::Add(sanity, hn::Add(num, den));
    } else {
      raw_x = hn::IfThenElseZero(m, hn::Set(d, seq.log_ratio));
    }
    x = raw_x;
    if (spec.ratio.log_clamp < kInfinity) {
      x = hn::Clamp(x, constant(-spec.ratio.log_clamp), constant(spec.ratio.log_clamp));
    }
    if (spec.ratio.log_cap < kInfinity) x = hn::Min(x, constant(spec.ratio.log_cap));
    live = hn::Eq(x, raw_x);
    r = exp_of(x);
  }
  const bool same_pair = uses_ratio && spec.ratio.level == Level::token &&
                         spec.ratio.pair == Pair{Stream::pi, Stream::rollout} &&
                         spec.ratio.log_clamp == kInfinity && spec.ratio.log_cap == kInfinity;

  // Gates.
  const hn::Vec<hn::Rebind<int32_t, D>> flags =
      in.flags != nullptr ? load_bytes(in.flags) : hn::Zero(di32);
  M low = hn::Lt(one, zero), high = low, dropped = low, penalty_dropped = low;
  if (in.flags != nullptr) {
    dropped = flag_mask(flags, kPolicyDropped);
    penalty_dropped = flag_mask(flags, kPenaltyDropped);
    low = flag_mask(flags, kBelow);
    high = flag_mask(flags, kAbove);
  }
  for (const Gate& gate : spec.gates) {
    if (gate.level != Level::token || gate.scope == GateScope::mask || in.gates_in_flags) continue;
    V value;
    if (gate.quantity == Quantity::ratio && uses_ratio && gate.pair == spec.ratio.pair &&
        spec.ratio.level == Level::token && gate.log_clamp == spec.ratio.log_clamp &&
        spec.ratio.log_cap == kInfinity) {
      value = r;
    } else {
      const V num = stream(gate.pair.numerator), den = stream(gate.pair.denominator);
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
    if (gate.scope == GateScope::policy_and_penalty) penalty_dropped = hn::Or(penalty_dropped, out);
  }
  low = hn::And(low, m);
  high = hn::And(high, m);
  dropped = hn::And(dropped, m);

  // Surrogate.
  const Surrogate& s = spec.surrogate;
  V loss = zero, by_ratio = zero, by_log_prob = zero, coefficient = r;
  M cut = hn::Lt(one, zero), binding = cut, dual = cut;
  switch (s.kind) {
    case SurrogateKind::ratio: loss = by_ratio = hn::Neg(hn::Mul(A, r)); break;
    case SurrogateKind::log_prob:
      loss = hn::Neg(hn::Mul(A, pi));
      by_log_prob = hn::Neg(A);
      coefficient = one;
      break;
    case SurrogateKind::clipped: {
      const V lo = constant(s.clip.low), hi = constant(s.clip.high), cap = constant(s.ratio_cap);
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
      if (s.dual_clip < kInfinity) {
        const V bound = hn::Mul(minus_A, constant(s.dual_clip));
        dual = hn::And(hn::And(hn::Lt(A, zero), hn::Gt(loss, bound)),
                       hn::Gt(r, constant(s.dual_clip)));
        loss = hn::IfThenElse(dual, bound, loss);
        by_ratio = hn::IfThenZeroElse(dual, by_ratio);
      }
      cut = hn::And(hn::Ne(A, zero), hn::Eq(by_ratio, zero));
      break;
    }
    case SurrogateKind::detached_ratio:
      coefficient = hn::Clamp(r, constant(s.clip.low), constant(s.clip.high));
      by_log_prob = hn::Neg(hn::Mul(coefficient, A));
      loss = hn::Mul(by_log_prob, pi);
      break;
    case SurrogateKind::soft_gate: {
      const V tau = hn::IfThenElse(hn::Gt(A_raw, zero), constant(s.tau_pos), constant(s.tau_neg));
      const V sigma = sigmoid(hn::Mul(tau, hn::Sub(r, one)));
      const V four = hn::Set(d, 4.0f);
      loss = hn::Neg(hn::Mul(A, hn::Div(hn::Mul(four, sigma), tau)));
      coefficient = hn::Mul(hn::Mul(four, hn::Mul(sigma, hn::Sub(one, sigma))), r);
      by_ratio = hn::Neg(hn::Mul(A, coefficient));
      break;
    }
  }
  M kept = hn::AndNot(hn::Or(dropped, cut), m);
  if (s.kind != SurrogateKind::log_prob && s.kind != SurrogateKind::detached_ratio) {
    kept = hn::AndNot(hn::AndNot(live, hn::Ne(A, zero)), kept);
  }

  // Corrections' weight.
  M paid = hn::AndNot(dropped, m);
  V weight = one;
  M zero_weight = hn::Lt(one, zero);
  if (in.weights != nullptr) {
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
  by_ratio = hn::IfThenElseZero(hn::And(paid, live), by_ratio);
  by_log_prob = hn::IfThenElseZero(paid, by_log_prob);
  coefficient = hn::IfThenElseZero(kept, coefficient);

  // Penalties.
  V penalty = zero;
  for (const Penalty& p : spec.penalties) {
    const V num = stream(p.pair.numerator), den = stream(p.pair.denominator);
    const V px = hn::Sub(num, den);
    sanity = hn::Add(sanity, hn::Add(num, den));
    M open = hn::AndNot(penalty_dropped, m);
    if (p.gate == PenaltyGate::kept) open = hn::AndNot(dropped, open);
    if (p.gate == PenaltyGate::nonzero_advantage) open = hn::And(open, hn::Ne(A_raw, zero));
    if (p.gate == PenaltyGate::selected) open = hn::And(open, flag_mask(flags, kSelected));
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
    const double toward_pi =
        (p.pair.numerator == Stream::pi) - static_cast<double>(p.pair.denominator == Stream::pi);
    value = hn::Mul(value, constant(p.coefficient));
    slope = hn::Mul(slope, constant(p.gradient ? p.coefficient * toward_pi : 0.0));
    if (p.times_ratio) {
      value = hn::Mul(value, r);
      slope = hn::Mul(slope, r);
      by_ratio = hn::Add(by_ratio, hn::IfThenElseZero(hn::And(open, live), value));
    }
    penalty = hn::Add(penalty, hn::IfThenElseZero(open, value));
    by_log_prob = hn::Add(by_log_prob, hn::IfThenElseZero(open, slope));
  }

  // Gradient.
  const V c = hn::Mul(batch_weight, hn::Set(d, seq.scale));
  const V total = hn::Add(loss, penalty);
  V grad = hn::Mul(c, by_log_prob);
  const V routed = hn::Mul(c, by_ratio);
  if (in.through == nullptr) grad = hn::Add(grad, routed);
  add(t.loss, hn::Mul(batch_weight, total));
  sanity = hn::IfThenElseZero(m, hn::Add(sanity, hn::Add(grad, total)));
  finite = hn::And(finite, hn::Le(hn::Abs(sanity), hn::Set(d, kLargest)));
  auto store = [&](V value, float* to) HWY_ATTR {
    if (whole) {
      hn::StoreU(value, d, to + i);
    } else {
      hn::BlendedStore(value, inside, d, to + i);
    }
  };
  store(grad, in.grad);
  if (in.through != nullptr) store(routed, in.through);

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
  const V capped = hn::Min(coefficient, constant(kRatioSumCap));
  add(t.coefficient, capped);
  t.coefficient_squared = hn::MulAdd(capped, capped, t.coefficient_squared);
  if (!spec.penalties.empty()) add(t.penalty, penalty);
  if (in.weights != nullptr) {
    count(t.weight_zero, zero_weight);
    add(t.weight, m, weight);
    t.weight_max = hn::Max(t.weight_max, hn::IfThenElse(m, weight, t.weight_max));
  }
  if (has_rollout) {
    V mx = raw_x, mr = r;
    if (!same_pair) {
      mx = hn::Sub(pi, stream(Stream::rollout));
      mr = exp_of(mx);
    }
    const V kl = k3_of(mx, mr);
    add(t.kl, m, kl);
    add(t.kl_positive, positive, kl);
    add(t.kl_negative, negative, kl);
    add(t.kl_dropped, gone, kl);
    add(t.abs_log_ratio, hn::Abs(mx));
    const V mr_capped = hn::IfThenElseZero(m, hn::Min(mr, constant(kRatioSumCap)));
    add(t.ratio, mr_capped);
    t.ratio_squared = hn::MulAdd(mr_capped, mr_capped, t.ratio_squared);
    t.ratio_min = hn::Min(t.ratio_min, hn::IfThenElse(m, mr, t.ratio_min));
    t.ratio_max = hn::Max(t.ratio_max, hn::IfThenElseZero(m, mr));
    t.kl_max = hn::Max(t.kl_max, hn::IfThenElseZero(m, kl));
    // Bins of trained lanes, compressed to the front.
    const V lowest = constant(0x1p-12);  // what NaN of an unread stream falls to, too
    const V limited =
        hn::IfThenElse(hn::Ge(mr, lowest), hn::Min(mr, constant(0x1.ffffp11)), lowest);
    const auto bits = hn::ShiftRight<18>(hn::BitCast(hn::Rebind<uint32_t, D>(), limited));
    HWY_ALIGN uint32_t bins[HWY_MAX_BYTES / sizeof(uint32_t)];
    const hn::Rebind<uint32_t, D> du32;
    const size_t n =
        hn::CompressStore(hn::Sub(bits, hn::Set(du32, static_cast<uint32_t>((127 - 12) << 5))),
                          hn::RebindMask(du32, m), du32, bins);
    for (size_t k = 0; k < n; ++k) ++histogram->bins[k & 3][bins[k]];
  }
  if (has_clip(spec)) {
    const M clip_low = hn::And(m, hn::Lt(r, constant(s.clip.low)));
    const M clip_high = hn::And(m, hn::Gt(r, constant(s.clip.high)));
    count(t.clip_binding, hn::And(m, binding));
    count(t.clip_low, clip_low);
    count(t.clip_high, clip_high);
    count(t.clip_signed, hn::Or(hn::And(clip_low, negative), hn::And(clip_high, positive)));
    count(t.clip_dual, hn::And(m, dual));
  }
  if (in.streams[static_cast<int>(Stream::ref)] != nullptr) {
    const V rx = hn::Sub(stream(Stream::ref), pi);
    add(t.ref_kl, m, k3_of(rx, exp_of(rx)));
  }
  if (in.streams[static_cast<int>(Stream::teacher)] != nullptr) {
    add(t.teacher_kl, hn::Sub(stream(Stream::teacher), pi));
  }
}

double sum_lanes(V value) { return hn::GetLane(hn::SumOfLanes(D(), value)); }

template <bool kMetrics>
void run_tokens(const LossSpec& spec, const TokenInputs& in, const SequenceNumbers& seq, size_t n,
                KernelSums& sums, KernelHistogram* histogram) {
  const D d;
  const size_t lanes = hn::Lanes(d);
  const V zero = hn::Zero(d);
  Totals t{};
  for (V* v : {&t.loss, &t.kl, &t.kl_positive, &t.kl_negative, &t.kl_dropped, &t.abs_log_ratio,
               &t.ratio, &t.ratio_squared, &t.coefficient, &t.coefficient_squared, &t.penalty,
               &t.weight, &t.ref_kl, &t.teacher_kl, &t.ratio_max, &t.kl_max}) {
    *v = zero;
  }
  t.ratio_min = hn::Inf(d);
  t.weight_max = hn::Neg(hn::Inf(d));
  M finite = hn::Eq(zero, zero);
  const M all = finite;
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    run_vector<kMetrics>(spec, in, seq, i, all, true, t, finite, histogram);
  }
  if (i < n) {
    run_vector<kMetrics>(spec, in, seq, i, hn::FirstN(d, n - i), false, t, finite, histogram);
  }
  sums.loss += static_cast<double>(seq.scale) * sum_lanes(t.loss);
  sums.not_finite = sums.not_finite || !hn::AllTrue(d, finite);
  if constexpr (!kMetrics) return;
  auto add_sum = [&](Slot slot, double value) { sums.slots[static_cast<int>(slot)] += value; };
  auto add_count = [&](Slot slot, uint64_t value) { add_sum(slot, static_cast<double>(value)); };
  add_sum(Slot::kl, sum_lanes(t.kl));
  add_sum(Slot::kl_positive, sum_lanes(t.kl_positive));
  add_sum(Slot::kl_negative, sum_lanes(t.kl_negative));
  add_sum(Slot::kl_dropped, sum_lanes(t.kl_dropped));
  add_sum(Slot::abs_log_ratio, sum_lanes(t.abs_log_ratio));
  add_sum(Slot::ratio, sum_lanes(t.ratio));
  add_sum(Slot::ratio_squared, sum_lanes(t.ratio_squared));
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
  if (in.streams[static_cast<int>(Stream::rollout)] != nullptr) {
    raise(Slot::ratio_min, hn::GetLane(hn::MinOfLanes(d, t.ratio_min)));
    raise(Slot::ratio_max, hn::GetLane(hn::MaxOfLanes(d, t.ratio_max)));
    raise(Slot::kl_max, hn::GetLane(hn::MaxOfLanes(d, t.kl_max)));
  }
  raise(Slot::weight_max,
        in.weights != nullptr ? hn::GetLane(hn::MaxOfLanes(d, t.weight_max)) : 1.0);
}

void token_kernel(const LossSpec& spec, const TokenInputs& in, const SequenceNumbers& seq, size_t n,
                  KernelSums& sums, KernelHistogram* histogram) {
  if (histogram != nullptr) {
    run_tokens<true>(spec, in, seq, n, sums, histogram);
  } else {
    run_tokens<false>(spec, in, seq, n, sums, nullptr);
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
