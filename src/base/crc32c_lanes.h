// CRC-32C of words that many lanes take turns to read, as a GPU computes it. All of it is
// constexpr, so that kernels and hosts run the same text.
//
// A CRC is a remainder of polynomials over bits: that of a sequence is the sum (xor) of its words,
// each times x^32 for itself and for every word that follows. So lane l of L sums words l, l + L,
// .. as sum * x^(32 L) + word, and its sum counts times x^(32 (L - l)). Sequences are cut into
// parts of kPartWords that are counted from the end: what the first part lacks stands for zeros,
// which add nothing.
#pragma once

#include <cstdint>
#include <span>

namespace leeway::crc32c_lanes {

inline constexpr int kLanes = 256;
inline constexpr int64_t kPartWords = 128 * kLanes;

// Polynomials are reflected: bit 31 is the coefficient of x^0.
inline constexpr uint32_t kOne = 1u << 31;

constexpr uint32_t product(uint32_t a, uint32_t b) {
  uint32_t sum = 0;
  for (uint32_t bit = kOne; bit != 0; bit >>= 1) {
    if ((a & bit) != 0) sum ^= b;
    b = (b >> 1) ^ ((b & 1) != 0 ? 0x82f63b78u : 0u);
  }
  return sum;
}

// x^(32 words): what the words before that many others count.
constexpr uint32_t shift_by(uint64_t words) {
  uint32_t result = kOne, square = product(kOne >> 16, kOne >> 16);  // x^32
  for (; words != 0; words >>= 1) {
    if ((words & 1) != 0) result = product(result, square);
    square = product(square, square);
  }
  return result;
}

constexpr int64_t parts_of(int64_t words) { return (words + kPartWords - 1) / kPartWords; }

// The sum of `words` words from the sums of their parts_of(words) parts, as crc32c gives it.
constexpr uint32_t joined(std::span<const uint32_t> parts, int64_t words) {
  const uint32_t shift = shift_by(kPartWords);
  uint32_t sum = 0;
  for (const uint32_t part : parts) sum = product(sum, shift) ^ part;
  return ~(sum ^ product(~0u, shift_by(static_cast<uint64_t>(words))));
}

}  // namespace leeway::crc32c_lanes
