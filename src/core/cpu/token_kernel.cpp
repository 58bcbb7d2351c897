// Vector code, compiled once per SIMD level and chosen at run time. It follows reference.cpp line
// by line; branches on the spec are the same for all tokens and cost next to nothing.
//
// Lanes of masked tokens are zeroed on load, so that whatever they hold is inert from there on.

#include "core/cpu/token_kernel.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/cpu/token_plan.h"
#include "core/participation.h"
#include "core/quantities.h"
#include "leeway/error.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/cpu/token_kernel.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "core/cpu/token_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace leeway {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

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

// What one pass over a chunk of tokens leaves for the metrics: they have a loop of their own, which
// keeps both loops' numbers in registers. Masks are bits, in bytes of their own per vector.
constexpr size_t kChunk = 1024;
struct Chunk {
  HWY_ALIGN float x[kChunk + HWY_MAX_BYTES / 4];      // log pi/rollout, 0 where masked
  HWY_ALIGN float ratio[kChunk + HWY_MAX_BYTES / 4];  // e^x
  HWY_ALIGN float coefficient[kChunk + HWY_MAX_BYTES / 4];
  HWY_ALIGN uint16_t bins[kChunk + HWY_MAX_BYTES / 4];
  enum Bits { trained, positive, negative, gone, low, high, kept, bit_kinds };
  HWY_ALIGN uint8_t bits[bit_kinds][kChunk + 8];
};

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
HWY_INLINE void run_vector(const TokenPlan& plan, const TokenInputs& in, const SequenceNumbers& seq,
                           size_t i, size_t rest, Totals& t, M& finite, Chunk& chunk, size_t at) {
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
      const V gr = gate.shares_ratio ? r : gate.needs_exp ? exp_of(gx) : one;
      value = quantity_of(gate.quantity, num, den, gx, gr);
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
      const V sign_of = plan.sequence_mean ? constant(seq.mean_advantage) : A_raw;
      const V tau =
          hn::IfThenElse(hn::Gt(sign_of, zero), constant(plan.tau_pos), constant(plan.tau_neg));
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
  // Where the coefficient is the ratio itself, the metrics' loop takes it from there.
  constexpr bool kRatioIsCoefficient = kShape == static_cast<int>(SurrogateKind::ratio);
  const size_t byte = at / hn::Lanes(d) * ((hn::Lanes(d) + 7) / 8);
  hn::StoreMaskBits(d, m, chunk.bits[Chunk::trained] + byte);
  hn::StoreMaskBits(d, positive, chunk.bits[Chunk::positive] + byte);
  hn::StoreMaskBits(d, negative, chunk.bits[Chunk::negative] + byte);
  // Few vectors hold a dropped token: the rows start as zeros.
  if (HWY_UNLIKELY(!hn::AllFalse(d, gone))) {
    hn::StoreMaskBits(d, gone, chunk.bits[Chunk::gone] + byte);
    hn::StoreMaskBits(d, low, chunk.bits[Chunk::low] + byte);
    hn::StoreMaskBits(d, high, chunk.bits[Chunk::high] + byte);
  }
  // What is neither dropped nor cut is kept; add_chunk makes that from the other rows.
  if (!kRatioIsCoefficient) hn::StoreMaskBits(d, kept, chunk.bits[Chunk::kept] + byte);
  if (!kRatioIsCoefficient || !plan.is_mismatch_ratio) {
    hn::Store(coefficient, d, chunk.coefficient + at);
  }
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
    hn::Store(mx, d, chunk.x + at);
    hn::Store(mr, d, chunk.ratio + at);
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

// The sums over a chunk that a run of run_vector left, `vectors` of them.
HWY_INLINE void add_chunk(const TokenPlan& plan, bool ratio_is_coefficient, Chunk& chunk,
                          size_t vectors, Totals& t) {
  const D d;
  const hn::Rebind<int32_t, D> di32;
  const hn::Rebind<uint16_t, D> du16;
  const size_t lanes = hn::Lanes(d), stride = (lanes + 7) / 8;
  const bool from_ratio = ratio_is_coefficient && plan.is_mismatch_ratio;
  const size_t bytes = vectors * stride, padded = (bytes + 7) / 8 * 8;
  if (ratio_is_coefficient) {
    for (size_t b = 0; b < bytes; ++b) {
      chunk.bits[Chunk::kept][b] =
          static_cast<uint8_t>(chunk.bits[Chunk::trained][b] & ~chunk.bits[Chunk::gone][b]);
    }
  }
  for (size_t v = 0; v < vectors && !from_ratio; ++v) {
    const V coefficient = hn::Min(hn::Load(d, chunk.coefficient + v * lanes), constant(kSumCap));
    add(t.coefficient, coefficient);
    t.coefficient_squared = hn::MulAdd(coefficient, coefficient, t.coefficient_squared);
  }
  for (size_t v = 0; v < vectors && plan.has_rollout; ++v) {
    auto bits = [&](Chunk::Bits kind)
                    HWY_ATTR { return hn::LoadMaskBits(d, chunk.bits[kind] + v * stride); };
    const V x = hn::Load(d, chunk.x + v * lanes), r = hn::Load(d, chunk.ratio + v * lanes);
    const V kl = k3_of(x, r);
    add(t.kl, kl);  // masked lanes hold x = 0
    add(t.kl_positive, bits(Chunk::positive), kl);
    add(t.kl_negative, bits(Chunk::negative), kl);
    add(t.kl_dropped, bits(Chunk::gone), kl);
    add(t.abs_log_ratio, hn::Abs(x));
    const V capped = hn::Min(r, constant(kSumCap));  // masked lanes hold 1, subtracted later
    add(t.ratio, capped);
    t.ratio_squared = hn::MulAdd(capped, capped, t.ratio_squared);
    if (from_ratio) {
      const V coefficient = hn::IfThenElseZero(bits(Chunk::kept), capped);
      add(t.coefficient, coefficient);
      t.coefficient_squared = hn::MulAdd(coefficient, coefficient, t.coefficient_squared);
    }
    const M m = bits(Chunk::trained);
    t.x_min = hn::IfThenElse(m, hn::Min(t.x_min, x), t.x_min);
    t.x_max = hn::IfThenElse(m, hn::Max(t.x_max, x), t.x_max);
    // Masked lanes are counted at ratio 1 with the rest; run_tokens takes them out again.
    const V lowest = constant(0x1p-12f);  // what NaN of an unread stream falls to, too
    const V limited = hn::IfThenElse(hn::Ge(r, lowest), hn::Min(r, constant(0x1.ffffp11f)), lowest);
    const auto bin =
        hn::Sub(hn::ShiftRight<18>(hn::BitCast(di32, limited)), hn::Set(di32, kFirstBin));
    hn::StoreU(hn::DemoteTo(du16, bin), du16, chunk.bins + v * lanes);
  }
  // Counts are bits: eight bytes at a time. Bits beyond the last vector are cleared first.
  for (auto& row : chunk.bits) std::memset(row + bytes, 0, padded - bytes);
  auto word = [&](Chunk::Bits kind, size_t at) {
    uint64_t out;
    std::memcpy(&out, chunk.bits[kind] + at, sizeof out);
    return out;
  };
  for (size_t at = 0; at < padded; at += 8) {
    const uint64_t gone = word(Chunk::gone, at);
    const uint64_t positive = word(Chunk::positive, at), negative = word(Chunk::negative, at);
    auto ones = [](uint64_t w) { return static_cast<uint64_t>(std::popcount(w)); };
    t.tokens += ones(word(Chunk::trained, at));
    t.positive += ones(positive);
    t.negative += ones(negative);
    t.dropped += ones(gone);
    t.dropped_low += ones(word(Chunk::low, at));
    t.dropped_high += ones(word(Chunk::high, at));
    t.dropped_positive += ones(gone & positive);
    t.dropped_negative += ones(gone & negative);
    t.kept += ones(word(Chunk::kept, at));
  }
}

// A byte for each of the first `count` tokens of a chunk that add_chunk has summed.
HWY_INLINE void write_kept(const Chunk& chunk, size_t count, uint8_t* kept) {
  const size_t lanes = hn::Lanes(D()), stride = (lanes + 7) / 8;
  for (size_t i = 0; i < count; ++i) {
    const size_t lane = i % lanes;
    kept[i] = chunk.bits[Chunk::kept][i / lanes * stride + lane / 8] >> (lane % 8) & 1;
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
void run_tokens(const TokenPlan& planned, const TokenInputs& inputs, const SequenceNumbers& seq,
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
  const TokenPlan plan = planned;
  const TokenInputs in = inputs;
  Chunk chunk;
  for (size_t begin = 0; begin < n; begin += kChunk) {
    const size_t end = std::min(n, begin + kChunk);
    size_t i = begin;
    if constexpr (kMetrics) {
      const size_t bytes = (end - begin + lanes - 1) / lanes * ((lanes + 7) / 8);
      for (auto row : {Chunk::gone, Chunk::low, Chunk::high})
        std::memset(chunk.bits[row], 0, bytes);
    }
    for (; i + lanes <= end; i += lanes) {
      run_vector<kMetrics, kShape, true>(plan, in, seq, i, lanes, t, finite, chunk, i - begin);
    }
    if (i < end) {
      run_vector<kMetrics, kShape, false>(plan, in, seq, i, end - i, t, finite, chunk, i - begin);
    }
    if constexpr (kMetrics) {
      add_chunk(plan, kShape == static_cast<int>(SurrogateKind::ratio), chunk,
                (end - begin + lanes - 1) / lanes, t);
      if (plan.has_rollout) count_bins(chunk.bins, end - begin, *histogram);
      if (in.kept != nullptr) write_kept(chunk, end - begin, in.kept + begin);
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
void run_shape(const TokenPlan& plan, const TokenInputs& in, const SequenceNumbers& seq, size_t n,
               KernelSums& sums, KernelHistogram* histogram) {
  auto run = [&](auto shape) {
    run_tokens<kMetrics, decltype(shape)::value>(plan, in, seq, n, sums, histogram);
  };
#ifdef LEEWAY_FEWER_KERNELS
  const bool specialised = false;  // sanitizers make each instantiation slow to compile
#else
  const bool specialised = plan.simple;
#endif
  if (!specialised) return run(std::integral_constant<int, kGeneral>());
#ifndef LEEWAY_FEWER_KERNELS
  switch (plan.kind) {
    case SurrogateKind::ratio: return run(std::integral_constant<int, 0>());
    case SurrogateKind::log_prob: return run(std::integral_constant<int, 1>());
    case SurrogateKind::clipped: return run(std::integral_constant<int, 2>());
    case SurrogateKind::detached_ratio: return run(std::integral_constant<int, 3>());
    case SurrogateKind::soft_gate: return run(std::integral_constant<int, 4>());
  }
#endif
}

void token_kernel(const LossSpec& spec, const TokenInputs& in, const SequenceNumbers& seq, size_t n,
                  KernelSums& sums, KernelHistogram* histogram) {
  const TokenPlan plan(spec, in);
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
