#include "torch/length_groups.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <numeric>
#include <set>

#include "base/rng.h"

namespace leeway {
namespace {

int64_t sum_of(const std::vector<int64_t>& lengths) {
  return std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
}

// Every packed row has one place, sequences lie in order at the beginning of theirs, and the rest
// of it is padding.
void expect_whole(const std::vector<int64_t>& lengths) {
  const LengthGroups padded = group_lengths(lengths);
  const int64_t packed = sum_of(lengths);
  ASSERT_EQ(static_cast<int64_t>(padded.places.size()), packed);
  std::vector<int64_t> starts, ends;
  for (const int64_t length : lengths) {
    starts.push_back(ends.empty() ? 0 : ends.back());
    ends.push_back(starts.back() + length);
  }
  std::set<int64_t> seen;
  int64_t next = 0;
  for (const auto& [first_row, sequences, length] : padded.groups) {
    EXPECT_EQ(first_row, next);
    next += sequences * length;
    for (int64_t s = 0; s < sequences; ++s) {
      const auto row = padded.rows.begin() + first_row + s * length;
      const auto start = std::find(starts.begin(), starts.end(), *row);
      ASSERT_NE(start, starts.end());
      EXPECT_TRUE(seen.insert(*start).second);
      const int64_t own = lengths[static_cast<size_t>(start - starts.begin())];
      ASSERT_LE(own, length);
      for (int64_t t = 0; t < length; ++t) {
        ASSERT_EQ(row[t], t < own ? *start + t : -1);
        if (t >= own) continue;
        ASSERT_EQ(padded.places[static_cast<size_t>(*start + t)], first_row + s * length + t);
      }
    }
  }
  EXPECT_EQ(next, static_cast<int64_t>(padded.rows.size()));
  EXPECT_EQ(seen.size(), lengths.size());
}

TEST(LengthGroups, HaveEveryRowOnceInOrder) {
  Rng rng(3);
  for (int round = 0; round < 50; ++round) {
    std::vector<int64_t> lengths(1 + rng.below(20));
    for (int64_t& length : lengths) {
      length = 1 + static_cast<int64_t>(rng.below(round % 2 == 0 ? 300 : 3000));
    }
    expect_whole(lengths);
  }
}

TEST(LengthGroups, OfOneLengthAreOneWithoutPadding) {
  for (const std::vector<int64_t>& lengths :
       {std::vector<int64_t>{5}, {1, 1, 1}, std::vector<int64_t>(7, 2048)}) {
    expect_whole(lengths);
    const LengthGroups padded = group_lengths(lengths);
    ASSERT_EQ(padded.groups.size(), 1u);
    EXPECT_EQ(padded.rows.size(), padded.places.size());
  }
}

TEST(LengthGroups, HaveFewShapesAndLittlePadding) {
  Rng rng(5);
  std::set<std::pair<int64_t, int64_t>> shapes;
  for (int round = 0; round < 200; ++round) {
    std::vector<int64_t> lengths(8 + rng.below(8));
    for (int64_t& length : lengths) length = 1024 + static_cast<int64_t>(rng.below(3072));
    const LengthGroups padded = group_lengths(lengths);
    for (const auto& group : padded.groups) {
      shapes.emplace(group.sequences, group.length);
      EXPECT_TRUE(std::has_single_bit(static_cast<uint64_t>(group.sequences)));
    }
    EXPECT_LE(static_cast<double>(padded.rows.size()),
              1.125 * static_cast<double>(sum_of(lengths)));
  }
  EXPECT_LE(shapes.size(), 64u);
}

}  // namespace
}  // namespace leeway
