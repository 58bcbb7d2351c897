// SIMD vectors as the number of the float32 formulas, and the formulas over them. Included once per
// SIMD level, hence the guard that Highway toggles.

#if defined(LEEWAY_CORE_CPU_VECTOR_NUMBER_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LEEWAY_CORE_CPU_VECTOR_NUMBER_INL_H_
#undef LEEWAY_CORE_CPU_VECTOR_NUMBER_INL_H_
#else
#define LEEWAY_CORE_CPU_VECTOR_NUMBER_INL_H_
#endif

#include <cstdint>

#include "core/float32/numbers.h"
#include "core/float32/plan.h"
#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"
#include "leeway/metrics.h"

HWY_BEFORE_NAMESPACE();
namespace leeway {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::ScalableTag<float>;
using Floats = hn::Vec<D>;
using Lanes = hn::Mask<D>;

template <class Number>
using MaskOf = Lanes;

template <class Number>
HWY_INLINE Floats constant(float value) {
  return hn::Set(D(), value);
}
template <class Number>
HWY_INLINE Lanes nothing() {
  return hn::Lt(hn::Set(D(), 1.0f), hn::Zero(D()));
}
HWY_INLINE Floats neg(Floats a) { return hn::Neg(a); }
HWY_INLINE Floats abs_of(Floats a) { return hn::Abs(a); }
HWY_INLINE Floats min_of(Floats a, Floats b) { return hn::Min(a, b); }
HWY_INLINE Floats max_of(Floats a, Floats b) { return hn::Max(a, b); }
HWY_INLINE Floats clamped(Floats x, Floats low, Floats high) { return hn::Clamp(x, low, high); }
HWY_INLINE Floats mul_add(Floats a, Floats b, Floats c) { return hn::MulAdd(a, b, c); }
// Infinity above float32's range (which 89 is beyond: the exponent overflows by itself).
HWY_INLINE Floats exp_of(Floats x) { return hn::Exp(D(), hn::Min(x, hn::Set(D(), 89.0f))); }
HWY_INLINE Floats log_of(Floats x) { return hn::Log(D(), x); }
HWY_INLINE Floats sign_or_zero(Floats x) {
  return hn::IfThenElseZero(hn::Ne(x, hn::Zero(D())), hn::CopySign(hn::Set(D(), 1.0f), x));
}
HWY_INLINE Lanes less(Floats a, Floats b) { return hn::Lt(a, b); }
HWY_INLINE Lanes greater(Floats a, Floats b) { return hn::Gt(a, b); }
HWY_INLINE Lanes at_most(Floats a, Floats b) { return hn::Le(a, b); }
HWY_INLINE Lanes at_least(Floats a, Floats b) { return hn::Ge(a, b); }
HWY_INLINE Lanes equal(Floats a, Floats b) { return hn::Eq(a, b); }
HWY_INLINE Lanes differ(Floats a, Floats b) { return hn::Ne(a, b); }
HWY_INLINE Floats select(Lanes mask, Floats a, Floats b) { return hn::IfThenElse(mask, a, b); }
HWY_INLINE Floats where(Lanes mask, Floats a) { return hn::IfThenElseZero(mask, a); }
HWY_INLINE Lanes both(Lanes a, Lanes b) { return hn::And(a, b); }
HWY_INLINE Lanes either(Lanes a, Lanes b) { return hn::Or(a, b); }
HWY_INLINE Lanes without(Lanes a, Lanes b) { return hn::AndNot(b, a); }
// Masks of 64 tokens, as counts take them.
HWY_INLINE uint64_t both(uint64_t a, uint64_t b) { return a & b; }
HWY_INLINE uint64_t either(uint64_t a, uint64_t b) { return a | b; }

#define LEEWAY_FORMULA HWY_INLINE
#include "core/float32/token_formula-inl.h"
#undef LEEWAY_FORMULA

using V = Floats;
using M = Lanes;

}  // namespace HWY_NAMESPACE
}  // namespace leeway
HWY_AFTER_NAMESPACE();

#endif  // LEEWAY_CORE_CPU_VECTOR_NUMBER_INL_H_
