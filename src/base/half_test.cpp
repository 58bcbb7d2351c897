#include "base/half.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "base/rng.h"

namespace leeway {
namespace {

// All finite numbers of the format, by brute force: the nearest, and of two the even one.
template <class From>
uint16_t nearest_by_search(float value, uint16_t infinity, From from) {
  uint16_t low = 0, high = infinity;  // magnitudes are in the order of their bits
  const double magnitude = std::fabs(static_cast<double>(value));
  while (high - low > 1) {
    const uint16_t middle = static_cast<uint16_t>((low + high) / 2);
    (static_cast<double>(from(middle)) <= magnitude ? low : high) = middle;
  }
  const double below = from(low);
  // Infinity stands where the next number would be.
  const double step = from(low) - static_cast<double>(from(static_cast<uint16_t>(low - 1)));
  const double above = high == infinity ? below + step : static_cast<double>(from(high));
  const double down = magnitude - below, up = above - magnitude;
  const bool take_low = down < up || (down == up && low % 2 == 0);
  return static_cast<uint16_t>((take_low ? low : high) | (std::signbit(value) ? 0x8000u : 0u));
}

TEST(Half, EveryNumberComesBack) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const uint16_t half = static_cast<uint16_t>(bits);
    const float f16 = from_f16(half), bf16 = from_bf16(half);
    if (std::isnan(f16)) {
      EXPECT_TRUE(std::isnan(from_f16(to_f16(f16))));
    } else {
      ASSERT_EQ(to_f16(f16), half);
    }
    if (std::isnan(bf16)) {
      EXPECT_TRUE(std::isnan(from_bf16(to_bf16(bf16))));
    } else {
      ASSERT_EQ(to_bf16(bf16), half);
    }
  }
}

TEST(Half, OtherNumbersBecomeTheNearest) {
  Rng rng(1);
  for (int i = 0; i < 200000; ++i) {
    float value = std::bit_cast<float>(static_cast<uint32_t>(rng.next()));
    // Half of them in the range of half precision, many of those exactly between two numbers.
    if (i % 2 == 0)
      value = std::ldexp(1.0f + static_cast<float>(rng.below(4096)) / 4096.0f,
                         static_cast<int>(rng.below(46)) - 28);
    if (!std::isfinite(value)) continue;
    ASSERT_EQ(to_f16(value), nearest_by_search(value, 0x7C00, from_f16)) << value;
    ASSERT_EQ(to_bf16(value), nearest_by_search(value, 0x7F80, from_bf16)) << value;
  }
}

TEST(Half, TheEndsAreRight) {
  EXPECT_EQ(to_f16(65504.0f), 0x7BFF);
  EXPECT_EQ(to_f16(65519.9f), 0x7BFF);
  EXPECT_EQ(to_f16(65520.0f), 0x7C00);
  EXPECT_EQ(to_f16(-std::numeric_limits<float>::infinity()), 0xFC00);
  EXPECT_EQ(to_f16(0x1p-25f), 0x0000);
  EXPECT_EQ(to_f16(0x1.8p-25f), 0x0001);
  EXPECT_EQ(to_bf16(std::numeric_limits<float>::infinity()), 0x7F80);
  EXPECT_EQ(to_bf16(-0.0f), 0x8000);
}

}  // namespace
}  // namespace leeway
