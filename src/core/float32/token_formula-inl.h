// The float32 formulas of a token: advantage, ratio, gates, surrogate, penalties and metrics, in
// one text for all devices. V is the number: a float on GPUs and in tests on the host (scalar.h),
// a SIMD vector of floats on CPUs (core/cpu/vector_number-inl.h). It follows reference.cpp, which
// is the same in double.
//
// No guard and no namespace: it is included inside a namespace that defines LEEWAY_FORMULA (what a
// function needs to be inlined there), MaskOf<V>, and the operations `constant` to `without` below.
// Vectors need that because the text is compiled once per SIMD level.
//
//   constant<V>(c)  nothing<V>()           a number, and the mask that is false
//   + - * /  neg  abs_of  min_of  max_of  clamped  mul_add  exp_of  log_of  sign_or_zero
//   less  greater  at_most  at_least  equal  differ                         comparisons
//   select(mask, a, b)  where(mask, a)     a or b, a or zero: never a product with the mask
//   both  either  without(a, b)            masks; without is a and not b
//
// Branches on the plan are the same for all tokens; what differs by token is selected.

// ---------------------------------------------------------------------------------------------
// Numbers

// e^x - 1 - x from r = e^x: a polynomial where the difference would cancel.
template <class V>
LEEWAY_FORMULA V k3_of(V x, V r) {
  V p = constant<V>(1.0f / 5040.0f);
  p = mul_add(p, x, constant<V>(1.0f / 720.0f));
  p = mul_add(p, x, constant<V>(1.0f / 120.0f));
  p = mul_add(p, x, constant<V>(1.0f / 24.0f));
  p = mul_add(p, x, constant<V>(1.0f / 6.0f));
  p = mul_add(p, x, constant<V>(0.5f));
  const V near = x * x * p;
  const V far = r - constant<V>(1.0f) - x;
  return select(less(abs_of(x), constant<V>(0.25f)), near, far);
}

// The larger of KL(a || b) and KL(b || a) over {taken token, any other}. With x = log a - log b and
// D = log((1 - a) / (1 - b)) both are sums of two products, so one logarithm serves them. `ratio`
// is e^x.
template <class V>
LEEWAY_FORMULA V largest_binary_kl(V log_a, V log_b, V ratio) {
  const V zero = constant<V>(0.0f), one = constant<V>(1.0f);
  const V la = min_of(log_a, zero), lb = min_of(log_b, zero);
  const V b = exp_of(lb), a = min_of(b * ratio, one);
  const V rest_a = neg(la + k3_of(la, a));  // 1 - a, without cancellation near 1
  const V rest_b = neg(lb + k3_of(lb, b));
  const MaskOf<V> some_a = greater(rest_a, zero), some_b = greater(rest_b, zero);
  const V quotient = select(both(some_a, some_b), rest_a / rest_b, one);
  const V log_rest = log_of(quotient);
  const V x = log_a - log_b;
  const V ab = mul_add(a, x, rest_a * log_rest);
  const V ba = neg(mul_add(b, x, rest_b * log_rest));
  // A certain token leaves nothing to the others; where only one side is certain they are
  // infinitely far apart.
  const MaskOf<V> one_sided = either(without(some_b, some_a), without(some_a, some_b));
  return select(one_sided, constant<V>(kFloatInfinity), max_of(ab, ba));
}

// KL(denominator || numerator), negative where the numerator is smaller. The 1e-8 keeps a certain
// token finite, as in the source this quantity comes from.
template <class V>
LEEWAY_FORMULA V signed_binary_kl(V num, V den) {
  const V one = constant<V>(1.0f), tiny = constant<V>(1e-8f);
  const V p = exp_of(num), q = exp_of(den);
  const V rest = one - q;
  const V odds = (rest + tiny) / (one - p + tiny);
  const V kl = mul_add(q, den - num, rest * log_of(odds));
  return select(greater(num, den), kl, neg(kl));
}

// ---------------------------------------------------------------------------------------------
// Advantage

// A' = adv_tau A + teacher_tau (log teacher - log pi). An input that is read and not finite shows
// in `sanity`, here and below.
template <class In, class V>
LEEWAY_FORMULA V shaped_advantage(const LossPlan& plan, const In& in, V& sanity) {
  V A = in.raw_advantage();
  if (plan.sequence_mean) A = in.mean_advantage();
  A = plan.constant_one ? constant<V>(1.0f) : A * constant<V>(plan.adv_tau);
  if (plan.teacher_tau != 0.0f) {
    const V teacher = in.stream(plan.teacher);
    sanity = sanity + teacher;
    A = mul_add(constant<V>(plan.teacher_tau), teacher - in.pi(), A);
  }
  if (plan.times_mask) A = where(in.in_batch_mask(), A);
  return A;
}

// ---------------------------------------------------------------------------------------------
// Ratio

template <class V>
struct TokenRatio {
  V log, value;      // the log ratio before limits, and e^(limited log ratio)
  MaskOf<V> inside;  // no limit acts: the ratio carries gradient
};

template <class Shape, class In, class V>
LEEWAY_FORMULA TokenRatio<V> ratio_of(const LossPlan& plan, const In& in, V& sanity) {
  TokenRatio<V> ratio{constant<V>(0.0f), constant<V>(1.0f), in.trained()};
  if (!(Shape::kPlain ? Shape::kind(plan) != SurrogateKind::log_prob : plan.uses_ratio)) {
    return ratio;
  }
  if (Shape::kPlain || plan.token_ratio) {
    // Every ratio of a surrogate has pi above the line.
    const V den = in.stream(plan.ratio_den);
    ratio.log = in.pi() - den;
    sanity = sanity + den;
  } else {
    ratio.log = where(in.trained(), in.log_ratio());
  }
  V x = ratio.log;
  if (!Shape::kPlain && plan.clamps_log) {
    x = clamped(x, constant<V>(-plan.log_clamp), constant<V>(plan.log_clamp));
    x = min_of(x, constant<V>(plan.log_cap));
    ratio.inside = equal(x, ratio.log);
  }
  ratio.value = exp_of(x);
  return ratio;
}

// ---------------------------------------------------------------------------------------------
// Gates

// One token's value of a gate quantity. x is the clamped log ratio of the gate's pair, r is e^x
// where the plan says that the quantity needs it.
template <class V>
LEEWAY_FORMULA V quantity_of(Quantity quantity, V num, V den, V x, V r) {
  switch (quantity) {
    case Quantity::ratio: return r;
    case Quantity::difference: return exp_of(num) - exp_of(den);
    case Quantity::k1: return x;
    case Quantity::k2: return constant<V>(0.5f) * (x * x);
    case Quantity::k3: return k3_of(x, r);
    case Quantity::binary_kl: return largest_binary_kl(num, den, r);
    case Quantity::signed_binary_kl: return signed_binary_kl(num, den);
  }
  return r;
}

template <class V>
struct GateSides {
  MaskOf<V> low, high;  // below the lower bound, above the upper one, where the bound applies
};

template <class V>
LEEWAY_FORMULA GateSides<V> judge(const PlannedGate& gate, V value, V advantage) {
  const V zero = constant<V>(0.0f);
  GateSides<V> out{less(value, constant<V>(gate.low)), greater(value, constant<V>(gate.high))};
  if (gate.sign == SignRule::both) return out;
  out.low = both(out.low, gate.sign == SignRule::zero_takes_low ? at_most(advantage, zero)
                                                                : less(advantage, zero));
  out.high = both(out.high, greater(advantage, zero));
  return out;
}

template <class V>
struct Verdict {
  MaskOf<V> low, high;        // of the token-level gates and of the flags
  MaskOf<V> dropped;          // the policy term is gone
  MaskOf<V> penalty_dropped;  // and the penalties
  MaskOf<V> selected;         // by the covariance selection
};

template <class Rules, class In, class V>
LEEWAY_FORMULA V token_gate_value(const PlannedGate& gate, const In& in, V r, V& sanity) {
  if (gate.uses_ratio) return r;
  const V num = in.stream(gate.num), den = in.stream(gate.den);
  const V x = clamped(num - den, constant<V>(-gate.log_clamp), constant<V>(gate.log_clamp));
  const V of_pair = gate.shares_ratio ? r : gate.needs_exp ? exp_of(x) : constant<V>(1.0f);
  sanity = sanity + (num + den);
  return Rules::quantity(gate.quantity, num, den, x, of_pair);
}

template <class Rules, class In, class V>
LEEWAY_FORMULA void apply_gate(const PlannedGate& gate, const In& in, V r, Verdict<V>& out,
                               V& sanity) {
  const V value = token_gate_value<Rules>(gate, in, r, sanity);
  const GateSides<V> sides = judge(gate, value, in.raw_advantage());
  out.low = either(out.low, sides.low);
  out.high = either(out.high, sides.high);
  const MaskOf<V> outside = either(sides.low, sides.high);
  out.dropped = either(out.dropped, outside);
  if (gate.scope == GateScope::policy_and_penalty) {
    out.penalty_dropped = either(out.penalty_dropped, outside);
  }
}

template <class Shape, class In, class V>
LEEWAY_FORMULA Verdict<V> apply_gates(const LossPlan& plan, const In& in, V r, V& sanity) {
  const MaskOf<V> none = nothing<V>();
  Verdict<V> out{none, none, none, none, none};
  if (!Shape::kPlain && in.has_flags()) {
    const auto flags = in.flags();
    out.dropped = in.flagged(flags, kPolicyDropped);
    out.penalty_dropped = in.flagged(flags, kPenaltyDropped);
    out.low = in.flagged(flags, kBelow);
    out.high = in.flagged(flags, kAbove);
    out.selected = in.flagged(flags, kSelected);
  }
  const int gates = in.gates_in_flags() ? 0 : plan.token_gates;
  // Most specs have one: it stands before the loop, which then costs nothing.
  if (gates > 0) apply_gate<typename Shape::Rules>(plan.gates[0], in, r, out, sanity);
  for (int g = 1; g < gates; ++g) {
    apply_gate<typename Shape::Rules>(plan.gates[g], in, r, out, sanity);
  }
  out.low = both(out.low, in.trained());
  out.high = both(out.high, in.trained());
  out.dropped = both(out.dropped, in.trained());
  return out;
}

// ---------------------------------------------------------------------------------------------
// Surrogate

// The policy term of a token and its derivatives: by the log ratio and directly by log pi.
template <class V>
struct PolicyTerm {
  V loss, by_ratio, by_log_prob;
  V coefficient;  // what multiplies the advantage in the gradient, where the term is not cut
  MaskOf<V> cut, clip_binding, dual_clipped;
};

template <class V>
LEEWAY_FORMULA PolicyTerm<V> uncut_term(V loss, V by_ratio, V by_log_prob, V coefficient) {
  const MaskOf<V> none = nothing<V>();
  return {loss, by_ratio, by_log_prob, coefficient, none, none, none};
}

template <class V>
LEEWAY_FORMULA PolicyTerm<V> ratio_surrogate(V r, V A) {
  const V loss = neg(A * r);
  return uncut_term(loss, loss, constant<V>(0.0f), r);
}

template <class V>
LEEWAY_FORMULA PolicyTerm<V> log_prob_surrogate(V A, V pi) {
  return uncut_term(neg(A * pi), constant<V>(0.0f), neg(A), constant<V>(1.0f));
}

// max(u, v) of the unclipped and the clipped branch; where they are equal the gradient is the mean
// of both.
template <class V>
LEEWAY_FORMULA PolicyTerm<V> clipped_surrogate(const LossPlan& plan, V r, V A) {
  const V zero = constant<V>(0.0f);
  const V lo = constant<V>(plan.clip_low), hi = constant<V>(plan.clip_high),
          cap = constant<V>(plan.ratio_cap);
  const V minus_A = neg(A);
  const MaskOf<V> inside_band = both(at_least(r, lo), at_most(r, hi));
  const V full = minus_A * r;
  const V u = minus_A * min_of(r, cap);
  const V du = where(at_most(r, cap), full);
  const V v = minus_A * clamped(r, lo, hi);
  const V dv = where(inside_band, full);
  PolicyTerm<V> out = uncut_term(max_of(u, v), zero, zero, r);
  out.clip_binding = greater(v, u);
  out.by_ratio =
      select(out.clip_binding, dv, select(greater(u, v), du, constant<V>(0.5f) * (du + dv)));
  if (plan.dual_clip < kFloatInfinity) {
    const V dual = constant<V>(plan.dual_clip), bound = minus_A * dual;
    out.dual_clipped = both(both(less(A, zero), greater(out.loss, bound)), greater(r, dual));
    out.loss = select(out.dual_clipped, bound, out.loss);
    out.by_ratio = select(out.dual_clipped, zero, out.by_ratio);
  }
  out.cut = both(differ(A, zero), equal(out.by_ratio, zero));
  return out;
}

template <class V>
LEEWAY_FORMULA PolicyTerm<V> detached_surrogate(const LossPlan& plan, V r, V A, V pi) {
  const V coefficient = clamped(r, constant<V>(plan.clip_low), constant<V>(plan.clip_high));
  const V by_log_prob = neg(coefficient * A);
  return uncut_term(by_log_prob * pi, constant<V>(0.0f), by_log_prob, coefficient);
}

template <class V>
LEEWAY_FORMULA PolicyTerm<V> soft_gate_surrogate(const LossPlan& plan, V r, V A, V sign_of) {
  const V one = constant<V>(1.0f), four = constant<V>(4.0f);
  const V tau = select(greater(sign_of, constant<V>(0.0f)), constant<V>(plan.tau_pos),
                       constant<V>(plan.tau_neg));
  const V sigma = one / (one + exp_of(neg(tau * (r - one))));
  const V coefficient = four * (sigma * (one - sigma)) * r;
  return uncut_term(neg(A * (four * sigma / tau)), neg(A * coefficient), constant<V>(0.0f),
                    coefficient);
}

// `sign_of` is the advantage whose sign chooses tau of the soft gate.
template <class V>
LEEWAY_FORMULA PolicyTerm<V> surrogate_of(SurrogateKind kind, const LossPlan& plan, V r, V A,
                                          V sign_of, V pi) {
  switch (kind) {
    case SurrogateKind::ratio: return ratio_surrogate(r, A);
    case SurrogateKind::log_prob: return log_prob_surrogate(A, pi);
    case SurrogateKind::clipped: return clipped_surrogate(plan, r, A);
    case SurrogateKind::detached_ratio: return detached_surrogate(plan, r, A, pi);
    case SurrogateKind::soft_gate: return soft_gate_surrogate(plan, r, A, sign_of);
  }
  return ratio_surrogate(r, A);
}

// ---------------------------------------------------------------------------------------------
// Penalties

template <class V>
struct PenaltyValue {
  V value, slope;  // slope: by the log ratio x
};

template <class V>
LEEWAY_FORMULA PenaltyValue<V> penalty_of(PenaltyKind kind, V x) {
  const V one = constant<V>(1.0f);
  switch (kind) {
    case PenaltyKind::k1: return {x, one};
    case PenaltyKind::k2: return {constant<V>(0.5f) * (x * x), x};
    case PenaltyKind::k3: {
      const V value = k3_of(x, exp_of(x));
      return {value, value + x};
    }
    case PenaltyKind::squared_log: return {x * x, x + x};
    case PenaltyKind::absolute: return {abs_of(x), sign_or_zero(x)};
  }
  return {x, one};
}

template <class In, class V>
LEEWAY_FORMULA MaskOf<V> penalty_acts(PenaltyGate gate, const In& in, const Verdict<V>& verdict) {
  const MaskOf<V> open = without(in.trained(), verdict.penalty_dropped);
  switch (gate) {
    case PenaltyGate::all: break;
    case PenaltyGate::kept: return without(open, verdict.dropped);
    case PenaltyGate::nonzero_advantage:
      return both(open, differ(in.raw_advantage(), constant<V>(0.0f)));
    case PenaltyGate::selected: return both(open, verdict.selected);
  }
  return open;
}

// Adds the penalties' derivatives to those of the policy term and returns their sum.
template <class In, class V>
LEEWAY_FORMULA V add_penalties(const LossPlan& plan, const In& in, const TokenRatio<V>& ratio,
                               const Verdict<V>& verdict, PolicyTerm<V>& term, V& sanity) {
  V sum = constant<V>(0.0f);
  for (int k = 0; k < plan.penalty_count; ++k) {
    const PlannedPenalty& p = plan.penalties[k];
    const V num = in.stream(p.num), den = in.stream(p.den);
    sanity = sanity + (num + den);
    const MaskOf<V> open = penalty_acts(p.gate, in, verdict);
    PenaltyValue<V> penalty = penalty_of(p.kind, num - den);
    penalty.value = penalty.value * constant<V>(p.coefficient);
    penalty.slope = penalty.slope * constant<V>(p.slope);
    if (p.times_ratio) {
      penalty.value = penalty.value * ratio.value;
      penalty.slope = penalty.slope * ratio.value;
      term.by_ratio = term.by_ratio + where(both(open, ratio.inside), penalty.value);
    }
    sum = sum + where(open, penalty.value);
    term.by_log_prob = term.by_log_prob + where(open, penalty.slope);
  }
  return sum;
}

// A detached weight from the log ratio at its level.
template <class V>
LEEWAY_FORMULA V weight_of(const PlannedWeight& w, V x) {
  const V raw = exp_of(clamped(x, constant<V>(-w.log_clamp), constant<V>(w.log_clamp)));
  const MaskOf<V> outside =
      either(less(raw, constant<V>(w.keep_low)), greater(raw, constant<V>(w.keep_high)));
  return select(outside, constant<V>(0.0f),
                clamped(raw, constant<V>(w.clamp_low), constant<V>(w.clamp_high)));
}

// ---------------------------------------------------------------------------------------------
// The token

template <class V>
struct TokenOut {
  MaskOf<V> trained;  // false: it takes no part, or a gate of scope `mask` took it out
  MaskOf<V> gone;     // dropped by a gate, a mask or a zero weight
  MaskOf<V> kept;     // its policy term carries gradient
  MaskOf<V> below, above, clip_binding, dual_clipped, zero_weight;
  V log_ratio, ratio, weight, penalty, coefficient;
  V loss;     // batch weight times (policy + penalties), before the scale
  V grad;     // d loss / d log pi, without what goes through the mean
  V through;  // d loss / d the sequence's log ratio
  V sanity;   // finite if every number that is read and every gradient is
};

// `Shape` says what is known of the plan when the code is compiled, and which rules apply.
template <class Shape, class In>
LEEWAY_FORMULA TokenOut<typename In::Number> evaluate_token(const LossPlan& plan, const In& in) {
  using V = typename In::Number;
  using M = MaskOf<V>;
  const V zero = constant<V>(0.0f);
  const M trained = in.trained();
  V sanity = in.pi() + in.raw_advantage();
  if (!Shape::kPlain) sanity = sanity + in.batch_weight();
  const V A = Shape::kPlain ? in.raw_advantage() : shaped_advantage(plan, in, sanity);
  const TokenRatio<V> ratio = ratio_of<Shape>(plan, in, sanity);
  const Verdict<V> verdict = apply_gates<Shape>(plan, in, ratio.value, sanity);
  const V sign_of = !Shape::kPlain && plan.sequence_mean ? in.mean_advantage() : in.raw_advantage();
  PolicyTerm<V> term =
      Shape::Rules::surrogate(Shape::kind(plan), plan, ratio.value, A, sign_of, in.pi());

  M kept = without(trained, either(verdict.dropped, term.cut));
  if (!Shape::kPlain && plan.by_ratio_alone && plan.clamps_log) {
    kept = without(kept, without(differ(A, zero), ratio.inside));
  }
  M paid = without(trained, verdict.dropped);
  V weight = constant<V>(1.0f);
  M zero_weight = nothing<V>();
  if (!Shape::kPlain && in.has_weight()) {
    weight = in.weight();
    zero_weight = both(trained, equal(weight, zero));
    paid = without(paid, zero_weight);
    kept = without(kept, zero_weight);
    term.loss = term.loss * weight;
    term.by_ratio = term.by_ratio * weight;
    term.by_log_prob = term.by_log_prob * weight;
    term.coefficient = term.coefficient * weight;
  }
  term.loss = where(paid, term.loss);
  term.by_ratio = where(Shape::kPlain ? paid : both(paid, ratio.inside), term.by_ratio);
  term.by_log_prob = where(paid, term.by_log_prob);
  term.coefficient = where(kept, term.coefficient);

  V penalty = zero, grad, routed = zero, loss = term.loss;
  if (Shape::kPlain) {
    grad = in.scale() * (term.by_log_prob + term.by_ratio);
  } else {
    penalty = add_penalties(plan, in, ratio, verdict, term, sanity);
    const V c = in.batch_weight() * in.scale();
    grad = c * term.by_log_prob;
    routed = c * term.by_ratio;
    if (!plan.through_mean) grad = grad + routed;
    loss = in.batch_weight() * (term.loss + penalty);
    sanity = sanity + routed;
  }
  sanity = sanity + grad;
  return {trained,
          either(verdict.dropped, zero_weight),
          kept,
          verdict.low,
          verdict.high,
          term.clip_binding,
          term.dual_clipped,
          zero_weight,
          ratio.log,
          ratio.value,
          weight,
          penalty,
          term.coefficient,
          loss,
          grad,
          routed,
          sanity};
}

// ---------------------------------------------------------------------------------------------
// Metrics: the table of what tokens add to the slots of leeway/metrics.h

// The log ratio pi / rollout and the ratio, which most metrics look at.
template <class V>
struct Mismatch {
  V log, ratio;
};

template <class In, class V>
LEEWAY_FORMULA Mismatch<V> mismatch_of(const LossPlan& plan, const In& in, const TokenOut<V>& out) {
  if (plan.is_mismatch_ratio) return {out.log_ratio, out.ratio};
  const V x = in.pi() - in.stream(static_cast<int>(Stream::rollout));
  return {x, exp_of(x)};
}

// Counts. A mask is a token's bool, or 64 tokens' bits.
template <class Facts, class Tally>
LEEWAY_FORMULA void count_tokens(const Facts& t, Tally& tally) {
  const auto positive = t.positive(), negative = t.negative(), gone = t.gone();
  tally.count(Slot::tokens, t.trained());
  tally.count(Slot::positive_tokens, positive);
  tally.count(Slot::negative_tokens, negative);
  tally.count(Slot::dropped, gone);
  tally.count(Slot::dropped_low, t.below());
  tally.count(Slot::dropped_high, t.above());
  tally.count(Slot::dropped_positive, both(gone, positive));
  tally.count(Slot::dropped_negative, both(gone, negative));
  tally.count(Slot::kept, t.kept());
  if (t.has_weight()) tally.count(Slot::weight_zero, t.zero_weight());
  if (t.has_clip()) {
    const auto low = t.clip_low(), high = t.clip_high();
    tally.count(Slot::clip_binding, t.clip_binding());
    tally.count(Slot::clip_low, low);
    tally.count(Slot::clip_high, high);
    tally.count(Slot::clip_signed, either(both(low, negative), both(high, positive)));
    tally.count(Slot::clip_dual, t.dual_clipped());
  }
}

// Sums of what multiplies the advantage in the gradient.
template <class Facts, class Tally>
LEEWAY_FORMULA void sum_coefficients(const Facts& t, Tally& tally) {
  using V = typename Facts::Number;
  const V c = min_of(t.coefficient(), constant<V>(kSumCap));
  tally.sum(Slot::coefficient, c);
  tally.sum_squares(Slot::coefficient_squared, c);
}

// Sums of the mismatch between pi and rollout. Extremes of ratios are gathered as log ratios;
// finished_slot() makes them what the slot says.
template <class Facts, class Tally>
LEEWAY_FORMULA void sum_mismatch(const Facts& t, Tally& tally) {
  using V = typename Facts::Number;
  const V x = t.mismatch_log(), r = t.mismatch_ratio();
  const V kl = k3_of(x, r);
  tally.sum(Slot::kl, kl);
  tally.sum(Slot::kl_positive, where(t.positive(), kl));
  tally.sum(Slot::kl_negative, where(t.negative(), kl));
  tally.sum(Slot::kl_dropped, where(t.gone(), kl));
  tally.sum(Slot::abs_log_ratio, abs_of(x));
  const V capped = min_of(r, constant<V>(kSumCap));
  tally.sum(Slot::ratio, capped);
  tally.sum_squares(Slot::ratio_squared, capped);
  tally.smallest(Slot::ratio_min, t.trained(), x);
  tally.largest(Slot::ratio_max, t.trained(), x);
}

// What a lane that takes no part adds to a slot of the mismatch: its log ratio is 0, its ratio 1.
// Vectors take it out once, at the end, instead of selecting at each sum.
LEEWAY_FORMULA double idle_value(Slot slot) {
  return slot == Slot::ratio || slot == Slot::ratio_squared ? 1.0 : 0.0;
}

// Sums of what few specs and batches have.
template <class Facts, class Tally>
LEEWAY_FORMULA void sum_others(const Facts& t, Tally& tally) {
  using V = typename Facts::Number;
  if (t.has_penalty()) tally.sum(Slot::penalty, t.penalty());
  if (t.has_weight()) {
    const V weight = t.weight();
    tally.sum(Slot::weight, where(t.trained(), weight));
    tally.largest(Slot::weight_max, t.trained(), weight);
  }
  if (t.has_ref()) {
    const V x = t.ref_log();
    tally.sum(Slot::ref_kl, where(t.trained(), k3_of(x, exp_of(x))));
  }
  if (t.has_teacher()) tally.sum(Slot::teacher_kl, t.teacher_log());
}

// The ratio within the bounds of the histogram; NaN, which a stream that the loss does
// not read may hold, falls to the lowest bin.
template <class V>
LEEWAY_FORMULA V binned_ratio(V r) {
  const V lowest = constant<V>(0x1p-12f);
  return select(at_least(r, lowest), min_of(r, constant<V>(0x1.ffffp11f)), lowest);
}

// ---------------------------------------------------------------------------------------------
// Rules and shapes

// What losses differ by. Tests put rules of their own in its place.
struct TokenRules {
  template <class V>
  static LEEWAY_FORMULA V quantity(Quantity quantity, V num, V den, V x, V r) {
    return quantity_of(quantity, num, den, x, r);
  }
  template <class V>
  static LEEWAY_FORMULA PolicyTerm<V> surrogate(SurrogateKind kind, const LossPlan& plan, V r, V A,
                                                V sign_of, V pi) {
    return surrogate_of(kind, plan, r, A, sign_of, pi);
  }
  // Sums beyond those of the table: none.
  static constexpr bool kSumsMore = false;
  template <class Facts, class Tally>
  static LEEWAY_FORMULA void sum_more(const Facts&, Tally&) {}
};

// Any plan.
template <class RulesOf>
struct AnyPlan {
  using Rules = RulesOf;
  static constexpr bool kPlain = false;
  static LEEWAY_FORMULA SurrogateKind kind(const LossPlan& plan) { return plan.kind; }
};

// A plan that is plain (see LossPlan), with one surrogate, on a batch without weights and flags.
template <SurrogateKind kKind>
struct PlainPlan {
  using Rules = TokenRules;
  static constexpr bool kPlain = true;
  static LEEWAY_FORMULA SurrogateKind kind(const LossPlan&) { return kKind; }
};
