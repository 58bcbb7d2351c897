// A surrogate, a gate quantity and a metric that exist for a test alone. As in token_formula-inl.h,
// this is one text for all devices: it is included inside a namespace that has the formulas.

// loss = -A log(1 + r), a gate on |x|^3, and the sum of x^2 over dropped tokens.
struct MadeUpRules {
  static constexpr int kSlots = kSlotCount + 1;
  static constexpr bool kSumsMore = true;

  template <class Number>
  static LEEWAY_FORMULA PolicyTerm<Number> surrogate(SurrogateKind, const LossPlan&, Number r,
                                                     Number A, Number, Number) {
    const Number one = constant<Number>(1.0f);
    const Number coefficient = r / (one + r);
    return uncut_term(neg(A * log_of(one + r)), neg(A * coefficient), constant<Number>(0.0f),
                      coefficient);
  }
  template <class Number>
  static LEEWAY_FORMULA Number quantity(Quantity, Number, Number, Number x, Number) {
    return abs_of(x) * (x * x);
  }
  template <class Facts, class Tally>
  static LEEWAY_FORMULA void sum_more(const Facts& t, Tally& tally) {
    const auto x = t.mismatch_log();
    tally.sum(static_cast<Slot>(kSlotCount), where(t.gone(), x * x));
  }
};
