// Vector functions of the token kernel. Included once per SIMD level, inside HWY_NAMESPACE's reach:
// hence the guard that Highway toggles.

#if defined(LEEWAY_CORE_CPU_TOKEN_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LEEWAY_CORE_CPU_TOKEN_MATH_INL_H_
#undef LEEWAY_CORE_CPU_TOKEN_MATH_INL_H_
#else
#define LEEWAY_CORE_CPU_TOKEN_MATH_INL_H_
#endif

#include <limits>

#include "core/participation.h"
#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"
#include "leeway/loss.h"

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
constexpr int kGeneral = -1;  // the loop that can do everything; others are a SurrogateKind each

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
// D = log((1 - a) / (1 - b)) both are sums of two products, so one logarithm serves them. `ratio`
// is e^x.
HWY_INLINE V largest_binary_kl(V log_a, V log_b, V ratio) {
  const D d;
  const V zero = hn::Zero(d), one = hn::Set(d, 1.0f);
  const V la = hn::Min(log_a, zero), lb = hn::Min(log_b, zero);
  const V b = exp_of(lb), a = hn::Min(hn::Mul(b, ratio), one);
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
    case Quantity::binary_kl: return largest_binary_kl(num, den, r);
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

}  // namespace HWY_NAMESPACE
}  // namespace leeway
HWY_AFTER_NAMESPACE();

#endif  // LEEWAY_CORE_CPU_TOKEN_MATH_INL_H_
