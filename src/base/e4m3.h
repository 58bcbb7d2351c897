// Numbers of one byte, as sampling in fp8 has them: a sign, four bits of exponent, three of
// fraction, no infinities ("e4m3fn"), and rows of them with one float32 scale each. This is the
// readable definition; cuda/coded_rows.h has the kernels, which give the same bits.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include "base/half.h"

namespace leeway {

inline constexpr float kMostE4m3 = 448.0f;
inline constexpr uint8_t kNanE4m3 = 0x7f;
// Of a row: a row of zeros has it too, so that nothing is divided by zero.
inline constexpr float kLeastE4m3Scale = 1e-30f;

inline float from_e4m3(uint8_t code) {
  const uint32_t sign = uint32_t{code & 0x80u} << 24, magnitude = code & 0x7Fu;
  const uint32_t exponent = magnitude >> 3, fraction = magnitude & 7u;
  if (magnitude == kNanE4m3) return std::bit_cast<float>(sign | 0x7FC00000u);
  if (exponent == 0) {  // zero or subnormal
    const float value = static_cast<float>(fraction) * 0x1p-9f;
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(value));
  }
  return std::bit_cast<float>(sign | (exponent + (127 - 7)) << 23 | fraction << 20);
}

// The nearest, ties to even; what is beyond 448, infinities too, becomes 448. NaN stays NaN.
inline uint8_t to_e4m3(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 24) & 0x80u, magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return kNanE4m3;
  if (magnitude >= std::bit_cast<uint32_t>(kMostE4m3)) return static_cast<uint8_t>(sign | 0x7Eu);
  const uint32_t exponent = magnitude >> 23;
  if (exponent > 127 - 7) {
    // Normal; a fraction that rounds up into the exponent is right there.
    return static_cast<uint8_t>(sign | rounded_shift(magnitude - ((127 - 7) << 23), 20));
  }
  // Subnormal: in units of 2^-9, of which the smallest that counts is one half.
  if (exponent < 127 - 10) return static_cast<uint8_t>(sign);
  const uint32_t fraction = (magnitude & 0x7FFFFFu) | 0x800000u;
  return static_cast<uint8_t>(sign | rounded_shift(fraction, 141 - exponent));
}

// A row as codes: what a number stands for is its code's value times the row's scale. The number of
// the largest magnitude becomes 448. NaN and infinite numbers become NaN.
inline float e4m3_scale(float largest) { return std::max(largest / kMostE4m3, kLeastE4m3Scale); }
inline float to_e4m3_row(const float* row, int64_t width, uint8_t* codes) {
  float largest = 0.0f;
  for (int64_t i = 0; i < width; ++i) largest = std::fmax(largest, std::fabs(row[i]));
  const float scale = e4m3_scale(largest), inverse = 1.0f / scale;
  for (int64_t i = 0; i < width; ++i) codes[i] = to_e4m3(row[i] * inverse);
  return scale;
}

}  // namespace leeway
