#include "base/e4m3.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "base/rng.h"

namespace leeway {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// The formula: (-1)^sign 2^(exponent - 7) (1 + fraction / 8), with exponent 0 for 2^-6 fraction
// / 8.
double value_by_formula(int code) {
  const int exponent = code >> 3 & 15, fraction = code & 7;
  const double magnitude = exponent == 0 ? std::ldexp(fraction / 8.0, -6)
                                         : std::ldexp(1.0 + fraction / 8.0, exponent - 7);
  return code >= 128 ? -magnitude : magnitude;
}

// By comparison with all finite numbers: the nearest, and of two the one with an even code.
uint8_t nearest_by_search(float value) {
  const double magnitude = std::fabs(static_cast<double>(value));
  int best = 0;
  for (int code = 1; code < kNanE4m3; ++code) {
    const double here = std::fabs(value_by_formula(code) - magnitude);
    const double before = std::fabs(value_by_formula(best) - magnitude);
    if (here < before || (here == before && code % 2 == 0)) best = code;
  }
  return static_cast<uint8_t>(best | (std::signbit(value) ? 0x80 : 0));
}

TEST(E4m3, AllCodesHaveTheFormulasValueAndComeBack) {
  for (int bits = 0; bits < 256; ++bits) {
    const auto code = static_cast<uint8_t>(bits);
    if ((bits & 0x7f) == kNanE4m3) {
      EXPECT_TRUE(std::isnan(from_e4m3(code))) << bits;
      EXPECT_EQ(to_e4m3(from_e4m3(code)), kNanE4m3) << bits;
      continue;
    }
    EXPECT_EQ(static_cast<double>(from_e4m3(code)), value_by_formula(bits)) << bits;
    EXPECT_EQ(to_e4m3(from_e4m3(code)), code) << bits;
  }
  EXPECT_EQ(from_e4m3(0x7e), kMostE4m3);
  EXPECT_EQ(from_e4m3(1), 0x1p-9f);
}

TEST(E4m3, TiesGoToTheEvenCode) {
  for (int bits = 0; bits + 1 < kNanE4m3; ++bits) {
    const auto low = static_cast<float>(value_by_formula(bits));
    const auto high = static_cast<float>(value_by_formula(bits + 1));
    const float middle = 0.5f * (low + high);  // exact: it has one bit more
    const int even = bits % 2 == 0 ? bits : bits + 1;
    EXPECT_EQ(to_e4m3(middle), even) << middle;
    EXPECT_EQ(to_e4m3(-middle), even | 0x80) << middle;
    EXPECT_EQ(to_e4m3(std::nextafter(middle, 0.0f)), bits) << middle;
    EXPECT_EQ(to_e4m3(std::nextafter(middle, kInfinity)), bits + 1) << middle;
  }
}

TEST(E4m3, RandomNumbersBecomeTheNearest) {
  Rng rng(1);
  for (int i = 0; i < 200'000; ++i) {
    const double magnitude = std::exp2(22.0 * rng.uniform() - 12.0);  // 2^-12 .. 2^10
    const auto value = static_cast<float>(rng.uniform() < 0.5 ? magnitude : -magnitude);
    ASSERT_EQ(to_e4m3(value), nearest_by_search(value)) << value;
  }
}

TEST(E4m3, TheEnds) {
  EXPECT_EQ(to_e4m3(0.0f), 0);
  EXPECT_EQ(to_e4m3(-0.0f), 0x80);
  for (const float tiny : {0x1p-10f, 1e-20f, std::numeric_limits<float>::denorm_min()}) {
    EXPECT_EQ(to_e4m3(tiny), 0) << tiny;  // 2^-10 is a tie
    EXPECT_EQ(to_e4m3(-tiny), 0x80) << tiny;
  }
  EXPECT_EQ(to_e4m3(std::nextafter(0x1p-10f, 1.0f)), 1);
  for (const float large : {448.0f, 449.0f, 464.0f, 480.0f, 1e30f, kInfinity}) {
    EXPECT_EQ(to_e4m3(large), 0x7e) << large;
    EXPECT_EQ(to_e4m3(-large), 0xfe) << large;
  }
  EXPECT_EQ(to_e4m3(kNan), kNanE4m3);
  EXPECT_EQ(to_e4m3(-kNan), kNanE4m3);
}

TEST(E4m3, ARowsLargestNumberIs448AndOthersAreWithinTheirStep) {
  Rng rng(2);
  std::vector<float> row(100);
  std::vector<uint8_t> codes(row.size());
  for (const double size : {1e-20, 1e-3, 1.0, 1e6}) {
    for (float& value : row) value = static_cast<float>(size * rng.normal());
    const float scale = to_e4m3_row(row.data(), 100, codes.data());
    int largest = 0;
    for (size_t i = 0; i < row.size(); ++i) {
      largest = std::max(largest, codes[i] & 0x7f);
      // Half a step: 1/16 of a number, or of the least normal one.
      const double step = std::max(std::fabs(static_cast<double>(row[i])), 0x1p-6 * scale) / 16.0;
      EXPECT_NEAR(static_cast<double>(from_e4m3(codes[i])) * scale, row[i], 1.0001 * step);
    }
    EXPECT_EQ(largest, 0x7e);
  }
}

TEST(E4m3, RowsOfZerosTinyAndBrokenNumbers) {
  std::vector<uint8_t> codes(3);
  const auto code = [&](std::vector<float> row) {
    return to_e4m3_row(row.data(), 3, codes.data());
  };
  EXPECT_EQ(code({0.0f, 0.0f, 0.0f}), kLeastE4m3Scale);
  EXPECT_EQ(codes, (std::vector<uint8_t>{0, 0, 0}));
  EXPECT_EQ(code({1e-40f, 0.0f, -1e-40f}), kLeastE4m3Scale);
  EXPECT_EQ(codes, (std::vector<uint8_t>{0, 0, 0x80}));
  EXPECT_EQ(code({1.0f, kNan, 2.0f}), 2.0f / kMostE4m3);
  EXPECT_EQ(codes, (std::vector<uint8_t>{0x76, kNanE4m3, 0x7e}));
  EXPECT_EQ(code({1.0f, -kInfinity, 2.0f}), kInfinity);
  EXPECT_EQ(codes[1], kNanE4m3);
}

}  // namespace
}  // namespace leeway
