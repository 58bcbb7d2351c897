#include "data/packed_batch.h"

#include <gtest/gtest.h>

namespace leeway {
namespace {

// Two samples of one rollout with one without a trained token in between.
std::vector<Sample> three_samples() {
  std::vector<Sample> samples(3);
  samples[0] = {.ids = {5, 6, 7, 8},
                .loss_mask = {0, 1, 0, 0},
                .advantages = {2.0f},
                .rollout = {0.0f, -1.0f, -2.0f, -3.0f},
                .versions = {-1, 4, 4, -1},
                .rollout_id = 9};
  samples[1] = {.ids = {1, 2},
                .loss_mask = {0, 0},
                .advantages = {3.0f},
                .rollout = {0.0f, -1.0f},
                .versions = {-1, -1}};
  samples[2] = {.ids = {1, 2, 3},
                .loss_mask = {0, 0, 1},
                .advantages = {0.0f, 0.0f, 4.0f},
                .rollout = {0.0f, 0.0f, -7.0f},
                .versions = {-1, -1, 5},
                .temperature = 0.5f,
                .rollout_id = 9};
  return samples;
}

TEST(PackedBatch, HoldsEachSampleUpToItsLastTrainedTokenOnce) {
  const PackedBatch batch = pack_samples(three_samples(), false);
  EXPECT_EQ(batch.first_row, (std::vector<int64_t>{0, 1, 1, 3}));
  EXPECT_EQ(batch.rollouts, (std::vector<std::vector<size_t>>{{0, 2}, {1}}));
  EXPECT_EQ(batch.rollout_ids, (std::vector<int32_t>{9, -3, 9}));
  EXPECT_EQ(batch.temperature, (std::vector<float>{1.0f, 1.0f, 0.5f}));
  EXPECT_EQ(batch.tokens, (std::vector<int32_t>{5, 1, 2}));
  EXPECT_EQ(batch.targets, (std::vector<int64_t>{6, 2, 3}));
  EXPECT_EQ(batch.mask, (std::vector<uint8_t>{1, 0, 1}));
  EXPECT_EQ(batch.advantages, (std::vector<float>{2.0f, 0.0f, 4.0f}));
  EXPECT_EQ(batch.rollout, (std::vector<float>{-1.0f, 0.0f, -7.0f}));
  EXPECT_EQ(batch.versions, (std::vector<PolicyVersion>{4, -1, 5}));
  EXPECT_TRUE(batch.weights.empty());
  EXPECT_EQ(batch.trained_of(0), 1);
  EXPECT_EQ(batch.trained_of(1), 0);
}

TEST(PackedBatch, KeepsEveryRowForALossThatLooksAtThem) {
  const PackedBatch batch = pack_samples(three_samples(), true);
  EXPECT_EQ(batch.first_row, (std::vector<int64_t>{0, 3, 3, 5}));
  EXPECT_EQ(batch.weights, (std::vector<float>{1.0f, 1.0f, 1.0f, 0.0f, 1.0f}));
}

TEST(PackedBatch, BringsValuesThereAndBack) {
  const std::vector<Sample> samples = three_samples();
  const PackedBatch batch = pack_samples(samples, false);
  const TokenValues values = {{9, 1, 9, 9}, {9, 9}, {9, 2, 3}};
  const std::vector<float> rows = pack_values(batch, values);
  EXPECT_EQ(rows, (std::vector<float>{1, 2, 3}));
  EXPECT_EQ(unpack_values(batch, samples, rows), (TokenValues{{0, 1, 0, 0}, {0, 0}, {0, 2, 3}}));
  EXPECT_TRUE(pack_values(batch, {}).empty());
}

TEST(PackedBatch, OfNothingIsEmpty) {
  const PackedBatch batch = pack_samples({}, false);
  EXPECT_EQ(batch.samples(), 0u);
  EXPECT_TRUE(unpack_values(batch, {}, {}).empty());
}

}  // namespace
}  // namespace leeway
