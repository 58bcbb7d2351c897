// The formulas against golden results of the public package gguf (0.19.0) over the same bytes: a
// checksum per type. tests/gguf_python_test.cpp runs the package itself.

#include "gguf/dequantise.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "base/crc32c.h"
#include "base/rng.h"

namespace leeway {
namespace {

template <class T>
uint32_t checksum_of(const std::vector<T>& values) {
  return crc32c({reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)});
}

struct GoldenType {
  GgufType type;
  std::vector<size_t> tops;  // bytes of a block that hold the top of a number's exponent
  uint32_t checksum;
};

TEST(Dequantise, EveryTypeHasTheBitsOfTheReference) {
  for (const GoldenType& golden : std::vector<GoldenType>{{GgufType::f32, {3}, 0x35a9f8b5},
                                                          {GgufType::f16, {1}, 0x05c39c8c},
                                                          {GgufType::bf16, {1}, 0x4dc03170},
                                                          {GgufType::q8_0, {1}, 0x3e19eca2},
                                                          {GgufType::q4_0, {1}, 0x516e79e9},
                                                          {GgufType::q4_1, {1, 3}, 0x032bbcc3},
                                                          {GgufType::q5_0, {1}, 0x7a28df79},
                                                          {GgufType::q5_1, {1, 3}, 0xffea018c},
                                                          {GgufType::q4_k, {1, 3}, 0x4094b71c},
                                                          {GgufType::q5_k, {1, 3}, 0xf4eb3d3a},
                                                          {GgufType::q6_k, {209}, 0x8526b912}}) {
    const GgufTypeInfo& info = info_of(golden.type);
    constexpr size_t kBlocks = 64;
    Rng rng(static_cast<uint64_t>(golden.type) + 1);
    std::vector<std::byte> blocks(kBlocks * info.block_bytes);
    for (std::byte& byte : blocks) byte = static_cast<std::byte>(rng.next() & 0xFF);
    for (size_t block = 0; block < kBlocks; ++block) {
      // Scales stay finite.
      for (const size_t top : golden.tops)
        blocks[block * info.block_bytes + top] &= std::byte{0xBF};
    }
    std::vector<float> values(kBlocks * info.elements);
    dequantise(golden.type, blocks, values);
    EXPECT_EQ(checksum_of(values), golden.checksum) << info.name;
  }
}

TEST(Quantise, EveryTypeHasTheBytesOfTheReference) {
  Rng rng(99);
  std::vector<float> values(4096);
  for (float& value : values) value = static_cast<float>((rng.uniform() - 0.5) * 4);
  std::fill(values.begin() + 32, values.begin() + 64, 0.0f);  // a block without a scale
  for (const auto& [type, expected] :
       std::vector<std::pair<GgufType, uint32_t>>{{GgufType::f32, 0x85331558},
                                                  {GgufType::f16, 0xaf76b5c7},
                                                  {GgufType::bf16, 0x7dd0e7f4},
                                                  {GgufType::q8_0, 0x2d0b6579}}) {
    const GgufTypeInfo& info = info_of(type);
    std::vector<std::byte> bytes(values.size() / info.elements * info.block_bytes);
    quantise(type, values, bytes);
    EXPECT_EQ(checksum_of(bytes), expected) << info.name;
    // The largest error is half a step: of half precision 2^-11 of the value, of bf16 2^-8 of it,
    // of Q8_0 half of 1/127 of the block's largest, with a scale that half precision has rounded.
    std::vector<float> back(values.size());
    dequantise(type, bytes, back);
    for (size_t i = 0; i < values.size(); ++i) ASSERT_NEAR(back[i], values[i], 0.009f) << info.name;
  }
}

// The smallest numbers have no inverse in float32.
TEST(Quantise, ABlockOfTinyNumbersBecomesZeros) {
  const std::vector<float> values(32, 1e-44f);
  std::vector<std::byte> bytes(34);
  quantise(GgufType::q8_0, values, bytes);
  std::vector<float> back(32, 1.0f);
  dequantise(GgufType::q8_0, bytes, back);
  for (const float value : back) EXPECT_EQ(value, 0.0f);
}

}  // namespace
}  // namespace leeway
