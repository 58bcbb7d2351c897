// Numbers of two bytes, as files store them: bfloat16 and IEEE half precision. To float32 exactly;
// from it to the nearest, ties to even.
#pragma once

#include <bit>
#include <cstdint>

namespace leeway {

inline float from_bf16(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

inline float from_f16(uint16_t bits) {
  const uint32_t sign = uint32_t{bits & 0x8000u} << 16;
  const uint32_t exponent = (bits >> 10) & 0x1Fu, fraction = bits & 0x3FFu;
  if (exponent == 0) {
    // Zero or subnormal; the result is a normal float32 either way, so flush-to-zero does no harm.
    const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
  }
  const uint32_t biased = exponent == 0x1Fu ? 0xFFu : exponent + (127 - 15);
  return std::bit_cast<float>(sign | (biased << 23) | (fraction << 13));
}

// `value` divided by 2^shift, to the nearest, ties to even.
inline uint32_t rounded_shift(uint32_t value, uint32_t shift) {
  const uint32_t half = (uint32_t{1} << (shift - 1)) - 1;
  return (value + half + ((value >> shift) & 1)) >> shift;
}

// NaN stays NaN.
inline uint16_t to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const bool nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
  return static_cast<uint16_t>(nan ? (bits >> 16) | 0x40u : rounded_shift(bits, 16));
}

// NaN stays NaN; what is beyond 65504 becomes infinite.
inline uint16_t to_f16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return static_cast<uint16_t>(sign | 0x7E00u);
  if (magnitude >= 0x47800000u) return static_cast<uint16_t>(sign | 0x7C00u);  // 2^16 and above
  const uint32_t exponent = magnitude >> 23;
  if (exponent > 127 - 15) {
    // Normal; a fraction that rounds up into the exponent is right there.
    return static_cast<uint16_t>(sign | rounded_shift(magnitude - ((127 - 15) << 23), 13));
  }
  // Subnormal: in units of 2^-24, of which the smallest that counts is one half.
  if (exponent < 127 - 25) return static_cast<uint16_t>(sign);
  const uint32_t fraction = (magnitude & 0x7FFFFFu) | 0x800000u;
  return static_cast<uint16_t>(sign | rounded_shift(fraction, 126 - exponent));
}

}  // namespace leeway
