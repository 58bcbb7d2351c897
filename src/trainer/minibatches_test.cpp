#include "trainer/minibatches.h"

#include <algorithm>
#include <map>

#include "trainer/test_support.h"

namespace leeway {
namespace {

using testing::make_samples;

TEST(Minibatches, PartitionTheSamplesWithRolloutsWhole) {
  for (uint64_t seed = 0; seed < 60; ++seed) {
    Rng rng(seed);
    const std::vector<Sample> samples = make_samples(seed, 1 + rng.below(40));
    const auto rollouts = samples_by_rollout(samples);
    const size_t count = 1 + rng.below(6);
    const auto parts = split_minibatches(samples, static_cast<int64_t>(count), seed);
    ASSERT_EQ(parts.size(), std::min(count, rollouts.size()));
    std::vector<size_t> part_of(samples.size(), 99);
    for (size_t p = 0; p < parts.size(); ++p) {
      ASSERT_TRUE(std::is_sorted(parts[p].begin(), parts[p].end()));
      for (size_t number : parts[p]) {
        ASSERT_EQ(part_of[number], 99u);
        part_of[number] = p;
      }
    }
    std::vector<size_t> sizes(parts.size());
    for (const auto& rollout : rollouts) {
      ASSERT_LT(part_of[rollout[0]], parts.size());
      for (size_t number : rollout) ASSERT_EQ(part_of[number], part_of[rollout[0]]);
      ++sizes[part_of[rollout[0]]];
    }
    const auto [least, most] = std::minmax_element(sizes.begin(), sizes.end());
    ASSERT_LE(*most - *least, 1u) << "seed " << seed;
  }
}

TEST(Minibatches, AreDecidedByTheSeed) {
  const std::vector<Sample> samples = make_samples(1, 40);
  EXPECT_EQ(split_minibatches(samples, 4, 7), split_minibatches(samples, 4, 7));
  EXPECT_NE(split_minibatches(samples, 4, 7), split_minibatches(samples, 4, 8));
}

TEST(Minibatches, OfOnePartHoldEverythingInOrder) {
  const std::vector<Sample> samples = make_samples(1, 12);
  const auto parts = split_minibatches(samples, 1, 3);
  ASSERT_EQ(parts.size(), 1u);
  for (size_t i = 0; i < samples.size(); ++i) EXPECT_EQ(parts[0][i], i);
}

}  // namespace
}  // namespace leeway
