// A float32 number as two of 16 bits: a bf16 number, the nearest one with ties to even, and what
// its bits lack to those of the float32 number. The first is what passes read, so that a weight
// takes four bytes instead of six.
//
// Halfway between two bf16 numbers, where the lower one is even, 16 bits do not suffice: the number
// below stands for it, a change by its last bit.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define LEEWAY_ON_BOTH __host__ __device__
#else
#define LEEWAY_ON_BOTH
#endif

namespace leeway::cuda {

// Bits of the two numbers.
struct SplitFloat {
  uint16_t high;
  int16_t low;
};

LEEWAY_ON_BOTH inline uint32_t joined_bits(SplitFloat x) {
  return (static_cast<uint32_t>(x.high) << 16) + static_cast<uint32_t>(static_cast<int32_t>(x.low));
}

LEEWAY_ON_BOTH inline SplitFloat split_bits(uint32_t bits) {
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {0x7fc0, 0};  // NaN
  const uint32_t high = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const auto low = static_cast<int32_t>(bits - (high << 16));
  return {static_cast<uint16_t>(high), static_cast<int16_t>(low > 0x7fff ? 0x7fff : low)};
}

}  // namespace leeway::cuda
