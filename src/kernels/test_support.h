// Shared by the tests of the kernels: SIMD levels, random numbers and comparisons.
#pragma once

#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "base/rng.h"

namespace leeway::testing {

inline constexpr double kEps = 0x1p-23;  // twice the largest error of one float32 rounding
inline constexpr float kFloatNan = std::numeric_limits<float>::quiet_NaN();
inline constexpr float kFloatInfinity = std::numeric_limits<float>::infinity();

// Pins the kernels to the best SIMD level they are built for that is not above `target`.
class PinTarget {
 public:
  explicit PinTarget(int64_t target) {
    pin(hwy::SupportedTargets() & ~(target - 1));  // lower bits are better levels
  }
  ~PinTarget() { pin(0); }
  PinTarget(const PinTarget&) = delete;
  PinTarget& operator=(const PinTarget&) = delete;

 private:
  static void pin(int64_t targets) {
    hwy::SetSupportedTargetsForTest(targets);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
};

// Calls body(target) with the kernels pinned to each SIMD level of this machine, best first.
template <class Body>
void at_every_level(Body body) {
  for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
    const PinTarget pin(target);
    SCOPED_TRACE(hwy::TargetName(target));
    body(target);
    if (::testing::Test::HasFatalFailure()) return;
  }
}

// Whether a multiply-add rounds once at this level.
inline bool fuses(int64_t target) {
#if HWY_ARCH_X86
  return target <= HWY_AVX2;
#else
  return target != HWY_EMU128 && target != HWY_SCALAR;
#endif
}

// One step of a chain with the rounding of the SIMD level; the product of two floats is exact in
// double.
inline float multiply_add(bool fused, float a, float b, float sum) {
  if (fused) return std::fma(a, b, sum);
  return static_cast<float>(static_cast<double>(a) * static_cast<double>(b)) + sum;
}

inline std::vector<float> random_floats(Rng& rng, int64_t count, double scale = 1.0) {
  std::vector<float> values;
  values.reserve(count);
  for (int64_t i = 0; i < count; ++i) values.push_back(static_cast<float>(scale * rng.normal()));
  return values;
}

inline constexpr float kUntouched = -77.0f;

// Row widths that cover every remainder of a vector.
inline const std::vector<int64_t>& widths() {
  static const std::vector<int64_t> list = [] {
    std::vector<int64_t> out(70);
    std::iota(out.begin(), out.end(), 1);
    for (int64_t width : {127, 128, 129, 1000}) out.push_back(width);
    return out;
  }();
  return list;
}

inline std::vector<double> widened(std::span<const float> values) {
  return {values.begin(), values.end()};
}

// Equal bit for bit, NaN and the sign of zero included.
inline ::testing::AssertionResult same_bits(std::span<const float> got,
                                            std::span<const float> expected) {
  if (got.size() != expected.size()) {
    return ::testing::AssertionFailure() << got.size() << " values, not " << expected.size();
  }
  for (size_t i = 0; i < got.size(); ++i) {
    if (std::bit_cast<uint32_t>(got[i]) == std::bit_cast<uint32_t>(expected[i])) continue;
    return ::testing::AssertionFailure() << "value " << i << " of " << got.size() << ": "
                                         << std::hexfloat << got[i] << ", not " << expected[i];
  }
  return ::testing::AssertionSuccess();
}

// Each value is within tolerance(i) of the expected one. Infinities and NaN match only themselves.
template <class Tolerance>
::testing::AssertionResult close_to(std::span<const float> got, std::span<const double> expected,
                                    Tolerance tolerance) {
  if (got.size() != expected.size()) {
    return ::testing::AssertionFailure() << got.size() << " values, not " << expected.size();
  }
  for (size_t i = 0; i < got.size(); ++i) {
    const double value = static_cast<double>(got[i]);
    if (value == expected[i] || (std::isnan(value) && std::isnan(expected[i]))) continue;
    if (std::abs(value - expected[i]) <= tolerance(i)) continue;
    return ::testing::AssertionFailure()
           << "value " << i << " of " << got.size() << ": " << value << ", not " << expected[i]
           << ", off by " << value - expected[i] << " with " << tolerance(i) << " allowed";
  }
  return ::testing::AssertionSuccess();
}

// The same with one tolerance, relative to the largest expected magnitude.
inline ::testing::AssertionResult close_to(std::span<const float> got,
                                           std::span<const double> expected, double relative) {
  double largest = 0.0;
  for (double value : expected) largest = std::max(largest, std::abs(value));
  return close_to(got, expected, [&](size_t) { return relative * largest; });
}

// d loss / d x by central differences. `x` is perturbed and restored.
template <class Loss>
std::vector<double> numeric_gradient(std::vector<double>& x, Loss loss, double step = 1e-4) {
  std::vector<double> gradient;
  for (double& value : x) {
    const double old = value;
    value = old + step;
    const double above = loss();
    value = old - step;
    gradient.push_back((above - loss()) / (2 * step));
    value = old;
  }
  return gradient;
}

}  // namespace leeway::testing
