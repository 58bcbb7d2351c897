#include "core/vector_math.h"

#include <cmath>
#include <cstring>

#include "core/quantities.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/vector_math.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "hwy/contrib/math/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace leeway {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;
constexpr size_t kMaxLanes = HWY_MAX_BYTES / sizeof(float);

// Mask bytes of `count` lanes; lanes that do not exist are out.
HWY_INLINE hn::Mask<D> load_mask(const uint8_t* mask, size_t count) {
  const D d;
  const hn::Rebind<uint8_t, D> du8;
  const hn::Rebind<int32_t, D> di32;
  if (mask == nullptr) return hn::FirstN(d, count);
  HWY_ALIGN uint8_t padded[HWY_MAX_BYTES] = {};
  if (count < hn::Lanes(d)) {
    std::memcpy(padded, mask, count);
    mask = padded;
  }
  return hn::RebindMask(d, hn::Ne(hn::PromoteTo(di32, hn::LoadU(du8, mask)), hn::Zero(di32)));
}

HWY_INLINE V load(const float* from, size_t count) {
  const D d;
  if (count >= hn::Lanes(d)) return hn::LoadU(d, from);
  HWY_ALIGN float padded[kMaxLanes] = {};
  std::memcpy(padded, from, count * sizeof(float));
  return hn::Load(d, padded);
}

void weigh(const Weight& w, const float* num, const float* den, const uint8_t* mask, float* out,
           size_t n) {
  const D d;
  const V one = hn::Set(d, 1.0f);
  auto constant = [&](double value) HWY_ATTR { return hn::Set(d, static_cast<float>(value)); };
  const V cap = constant(w.log_clamp), top = constant(89.0);  // e^89 is infinity already
  const V clamp_low = constant(w.clamp.low), clamp_high = constant(w.clamp.high);
  const V keep_low = constant(w.keep.low), keep_high = constant(w.keep.high);
  for (size_t i = 0; i < n; i += hn::Lanes(d)) {
    const size_t count = n - i;
    const auto m = load_mask(mask + i, count);
    V x = hn::IfThenElseZero(m, hn::Sub(load(num + i, count), load(den + i, count)));
    x = hn::Min(hn::Clamp(x, hn::Neg(cap), cap), top);
    const V raw = hn::Exp(d, x);
    const auto keep = hn::And(hn::Ge(raw, keep_low), hn::Le(raw, keep_high));
    const V weight = hn::IfThenElseZero(keep, hn::Clamp(raw, clamp_low, clamp_high));
    const V result = hn::IfThenElse(m, weight, one);
    if (count >= hn::Lanes(d)) {
      hn::StoreU(result, d, out + i);
    } else {
      HWY_ALIGN float padded[kMaxLanes];
      hn::Store(result, d, padded);
      std::memcpy(out + i, padded, count * sizeof(float));
    }
  }
}

// Float sums of short runs, joined in double.
void sum_log_ratios(const float* num, const float* den, const uint8_t* mask, size_t n, double& sum,
                    double& counted) {
  const D d;
  constexpr size_t kRun = 512;
  size_t members = 0;
  for (size_t begin = 0; begin < n; begin += kRun) {
    const size_t end = HWY_MIN(n, begin + kRun);
    V total = hn::Zero(d);
    for (size_t i = begin; i < end; i += hn::Lanes(d)) {
      const auto m = load_mask(mask == nullptr ? nullptr : mask + i, end - i);
      const V x = hn::Sub(load(num + i, end - i), load(den + i, end - i));
      total = hn::Add(total, hn::IfThenElseZero(m, x));
      members += hn::CountTrue(d, m);
    }
    sum += static_cast<double>(hn::GetLane(hn::SumOfLanes(d, total)));
  }
  counted += static_cast<double>(members);
}

}  // namespace HWY_NAMESPACE
}  // namespace leeway
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace leeway {

HWY_EXPORT(weigh);
HWY_EXPORT(sum_log_ratios);

void token_weights(const Weight& w, std::span<const double> num, std::span<const double> den,
                   std::span<const uint8_t> mask, std::span<double> out) {
  for (size_t t = 0; t < out.size(); ++t) {
    out[t] = 1.0;
    if (!mask[t]) continue;
    const double raw = std::exp(std::min(std::max(num[t] - den[t], -w.log_clamp), w.log_clamp));
    const bool outside = below(raw, w.keep.low) || above(raw, w.keep.high);
    out[t] = outside ? 0.0 : limit(raw, w.clamp);
  }
}

void token_weights(const Weight& w, std::span<const float> num, std::span<const float> den,
                   std::span<const uint8_t> mask, std::span<float> out) {
  HWY_DYNAMIC_DISPATCH(weigh)(w, num.data(), den.data(), mask.data(), out.data(), out.size());
}

std::pair<double, double> log_ratio_sum(std::span<const double> num, std::span<const double> den,
                                        std::span<const uint8_t> mask) {
  double sum = 0.0, count = 0.0;
  for (size_t t = 0; t < num.size(); ++t) {
    if (mask.empty() || mask[t]) sum += num[t] - den[t], count += 1.0;
  }
  return {sum, count};
}

std::pair<double, double> log_ratio_sum(std::span<const float> num, std::span<const float> den,
                                        std::span<const uint8_t> mask) {
  double sum = 0.0, count = 0.0;
  HWY_DYNAMIC_DISPATCH(sum_log_ratios)
  (num.data(), den.data(), mask.empty() ? nullptr : mask.data(), num.size(), sum, count);
  return {sum, count};
}

}  // namespace leeway
#endif
