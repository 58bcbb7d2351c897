#include "core/vector_math.h"

#include <cmath>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/vector_math.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "hwy/contrib/math/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace leeway {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

void exp_floats(float* values, size_t count) {
  const hn::ScalableTag<float> d;
  const auto top = hn::Set(d, 88.7228f);
  size_t i = 0;
  auto exp_of = [&](auto x) HWY_ATTR {
    const auto e = hn::Exp(d, hn::Min(x, top));
    return hn::IfThenElse(hn::Gt(x, top), hn::Inf(d), e);
  };
  for (; i + hn::Lanes(d) <= count; i += hn::Lanes(d)) {
    hn::StoreU(exp_of(hn::LoadU(d, values + i)), d, values + i);
  }
  if (i < count) {
    HWY_ALIGN float tail[HWY_MAX_BYTES / sizeof(float)] = {};
    for (size_t k = i; k < count; ++k) tail[k - i] = values[k];
    hn::Store(exp_of(hn::Load(d, tail)), d, tail);
    for (size_t k = i; k < count; ++k) values[k] = tail[k - i];
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace leeway
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace leeway {

HWY_EXPORT(exp_floats);

void exp_in_place(std::span<double> values) {
  for (double& v : values) v = std::exp(v);
}

void exp_in_place(std::span<float> values) {
  HWY_DYNAMIC_DISPATCH(exp_floats)(values.data(), values.size());
}

}  // namespace leeway
#endif
