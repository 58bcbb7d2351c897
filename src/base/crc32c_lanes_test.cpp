#include "base/crc32c_lanes.h"

#include <gtest/gtest.h>

#include <string_view>
#include <vector>

#include "base/crc32c.h"
#include "base/rng.h"

namespace leeway {
namespace {

using namespace crc32c_lanes;

// What the kernel does, lane by lane.
uint32_t part_of(const std::vector<uint32_t>& words, int64_t begin) {
  uint32_t part = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    uint32_t sum = 0;
    for (int64_t at = begin + lane; at < begin + kPartWords; at += kLanes) {
      sum = product(sum, shift_by(kLanes)) ^ (at < 0 ? 0u : words[static_cast<size_t>(at)]);
    }
    part ^= product(sum, shift_by(static_cast<uint64_t>(kLanes - lane)));
  }
  return part;
}

TEST(Crc32cLanes, GiveTheSumOfTheBytes) {
  Rng rng(7);
  for (const int64_t count : {int64_t{1}, int64_t{2}, int64_t{255}, int64_t{257}, kPartWords - 1,
                              kPartWords, kPartWords + 1, 2 * kPartWords + 1000}) {
    std::vector<uint32_t> words(static_cast<size_t>(count));
    for (uint32_t& word : words) word = static_cast<uint32_t>(rng.below(uint64_t{1} << 32));
    std::vector<uint32_t> parts;
    for (int64_t k = parts_of(count); k > 0; --k) {
      parts.push_back(part_of(words, count - k * kPartWords));
    }
    const std::string_view bytes(reinterpret_cast<const char*>(words.data()), 4 * words.size());
    EXPECT_EQ(joined(parts, count), crc32c(bytes)) << count << " words";
  }
  EXPECT_EQ(joined({}, 0), crc32c(""));
}

TEST(Crc32c, TablesAndTheProcessorGiveTheSameSum) {
  EXPECT_EQ(crc32c("123456789"), 0xe3069283u);
  EXPECT_EQ(crc32c_by_tables("123456789"), 0xe3069283u);
  Rng rng(8);
  std::string bytes;
  for (int length = 0; length < 300; ++length) {
    EXPECT_EQ(crc32c(bytes), crc32c_by_tables(bytes)) << length << " bytes";
    const size_t half = bytes.size() / 2;
    EXPECT_EQ(crc32c(bytes.substr(half), crc32c(bytes.substr(0, half))), crc32c(bytes));
    bytes += static_cast<char>(rng.below(256));
  }
}

}  // namespace
}  // namespace leeway
