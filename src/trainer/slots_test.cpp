#include "trainer/slots.h"

#include <gtest/gtest.h>

#include <set>

#include "trainer/micro_batch.h"
#include "trainer/test_support.h"

namespace leeway {
namespace {

using testing::make_samples;

std::vector<size_t> samples_of(const GradientSlot& slot) {
  std::vector<size_t> samples;
  for (const auto& part : slot) samples.insert(samples.end(), part.begin(), part.end());
  return samples;
}

TEST(Slots, HaveEachSampleOnceWithItsRollout) {
  for (uint64_t seed = 0; seed < 30; ++seed) {
    const std::vector<Sample> samples = make_samples(seed, 3 + seed % 40);
    const PackedBatch batch = pack_samples(samples, false);
    std::vector<size_t> only;
    for (size_t i = seed % 3; i < samples.size() && seed % 2 == 1; i += 3) only.push_back(i);
    for (const int64_t count : {1, 2, 4, 8, 64}) {
      const std::vector<GradientSlot> slots = plan_slots(batch, count, 30, only);
      ASSERT_EQ(slots.size(), static_cast<size_t>(count));
      std::map<int32_t, size_t> place;
      std::set<size_t> seen;
      for (size_t s = 0; s < slots.size(); ++s) {
        for (size_t number : samples_of(slots[s])) {
          EXPECT_TRUE(seen.insert(number).second);
          EXPECT_EQ(place.emplace(batch.rollout_ids[number], s).first->second, s);
        }
      }
      std::set<size_t> expected;
      for (size_t i = 0; i < samples.size(); ++i) {
        const bool asked = only.empty() || std::count(only.begin(), only.end(), i) > 0;
        if (asked && batch.rows_of(i) > 0) expected.insert(i);
      }
      EXPECT_EQ(seen, expected);
    }
  }
}

TEST(Slots, HaveAboutTheSameNumberOfRows) {
  const std::vector<Sample> samples = make_samples(3, 400, true);
  const PackedBatch batch = pack_samples(samples, false);
  size_t longest = 0;
  for (const auto& rollout : batch.rollouts) {
    size_t rows = 0;
    for (size_t number : rollout) rows += static_cast<size_t>(batch.rows_of(number));
    longest = std::max(longest, rows);
  }
  const std::vector<GradientSlot> slots = plan_slots(batch, 8, 1000);
  const double mean = static_cast<double>(batch.tokens.size()) / 8.0;
  for (const GradientSlot& slot : slots) {
    EXPECT_NEAR(static_cast<double>(rows_of(batch, slot)), mean, static_cast<double>(longest));
  }
}

TEST(Slots, OneIsThePlanOfMicroBatches) {
  const std::vector<Sample> samples = make_samples(9, 50);
  const PackedBatch batch = pack_samples(samples, false);
  EXPECT_EQ(plan_slots(batch, 1, 40)[0], plan_micro_batches(batch, 40));
}

}  // namespace
}  // namespace leeway
