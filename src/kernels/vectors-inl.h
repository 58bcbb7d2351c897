// Float vectors of any length: whole vectors in place, the remainder through a buffer, so that
// every element goes through the same instructions wherever it lies. Included once per SIMD level,
// hence the guard that Highway toggles.

#if defined(LEEWAY_KERNELS_VECTORS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LEEWAY_KERNELS_VECTORS_INL_H_
#undef LEEWAY_KERNELS_VECTORS_INL_H_
#else
#define LEEWAY_KERNELS_VECTORS_INL_H_
#endif

#include <cstdint>
#include <cstring>
#include <limits>

#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace leeway {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;

constexpr float kFloatInfinity = std::numeric_limits<float>::infinity();
constexpr size_t kMostLanes = HWY_MAX_BYTES / sizeof(float);

HWY_INLINE int64_t lanes() { return static_cast<int64_t>(hn::Lanes(D())); }

// Loads `count` floats, zero beyond.
HWY_INLINE V load(const float* from, int64_t count) {
  const D d;
  if (count >= lanes()) return hn::LoadU(d, from);
  HWY_ALIGN float padded[kMostLanes] = {};
  std::memcpy(padded, from, static_cast<size_t>(count) * sizeof(float));
  return hn::Load(d, padded);
}

HWY_INLINE void store(V value, float* to, int64_t count) {
  const D d;
  if (count >= lanes()) {
    hn::StoreU(value, d, to);
    return;
  }
  HWY_ALIGN float padded[kMostLanes];
  hn::Store(value, d, padded);
  std::memcpy(to, padded, static_cast<size_t>(count) * sizeof(float));
}

// body(i, count): elements i .. i+count-1, where count is at most a vector's lanes.
template <class Body>
HWY_INLINE void for_lanes(int64_t n, Body&& body) {
  int64_t i = 0;
  for (; i + lanes() <= n; i += lanes()) body(i, lanes());
  if (i < n) body(i, n - i);
}

// body(tag, i): the same without a buffer, for loops that pass over the elements many times: whole
// vectors first, then ever shorter ones.
template <class Body>
HWY_INLINE void for_pieces(int64_t n, Body&& body) {
  int64_t i = 0;
  const auto cover = [&](auto tag) HWY_ATTR {
    for (const auto size = static_cast<int64_t>(hn::Lanes(tag)); i + size <= n; i += size) {
      body(tag, i);
    }
  };
  cover(D());
  cover(hn::CappedTag<float, 8>());
  cover(hn::CappedTag<float, 4>());
  cover(hn::CappedTag<float, 1>());
}

HWY_INLINE float sum_of(V v) { return hn::GetLane(hn::SumOfLanes(D(), v)); }

// Lane by lane: on emulated vectors, Highway's own reduction starts from the lowest finite number.
HWY_INLINE float max_of(V v) {
  const D d;
  HWY_ALIGN float values[kMostLanes];
  hn::Store(v, d, values);
  float largest = values[0];
  for (int64_t i = 1; i < lanes(); ++i) largest = values[i] > largest ? values[i] : largest;
  return largest;
}

// e^x; infinity above the range of float32 (from 89 on the exponent overflows by itself). Highway's
// Exp maps NaN to 0; this keeps NaN.
HWY_INLINE V exp_of(V x) {
  const D d;
  return hn::IfThenElse(hn::IsNaN(x), x, hn::Exp(d, hn::Min(x, hn::Set(d, 89.0f))));
}

}  // namespace HWY_NAMESPACE
}  // namespace leeway
HWY_AFTER_NAMESPACE();

#endif
