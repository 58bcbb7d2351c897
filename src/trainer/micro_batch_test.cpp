#include "trainer/micro_batch.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "trainer/test_support.h"

namespace leeway {
namespace {

using testing::make_micro_batches;
using testing::make_samples;

// Each token's value tells which sample and token it belongs to.
float mark(size_t sample, size_t token, int kind) {
  return static_cast<float>(10000 * kind) + static_cast<float>(100 * sample + token);
}

TokenValues marks(std::span<const Sample> samples, int kind) {
  TokenValues values(samples.size());
  for (size_t i = 0; i < samples.size(); ++i) {
    for (size_t t = 0; t < samples[i].ids.size(); ++t) values[i].push_back(mark(i, t, kind));
  }
  return values;
}

std::vector<Sample> marked_samples(uint64_t seed, size_t count) {
  std::vector<Sample> samples = make_samples(seed, count);
  const TokenValues rollout = marks(samples, 1);
  for (size_t i = 0; i < count; ++i) samples[i].rollout = rollout[i];
  return samples;
}

size_t last_trained(const Sample& sample) {
  for (size_t t = sample.loss_mask.size(); t-- > 0;) {
    if (sample.loss_mask[t] != 0) return t;
  }
  return 0;
}

TEST(MicroBatches, ShiftEveryListByOneAndStopAtTheLastTrainedToken) {
  for (const bool every_row : {false, true}) {
    const std::vector<Sample> samples = marked_samples(11, 23);
    const PolicyStreams streams{marks(samples, 2), marks(samples, 3), marks(samples, 4)};
    std::set<size_t> seen;
    for (const MicroBatch& batch : make_micro_batches(samples, streams, 50, every_row)) {
      ASSERT_EQ(batch.cu_seqlens.front(), 0);
      ASSERT_EQ(batch.cu_seqlens.size(), batch.samples.size() + 1);
      ASSERT_EQ(batch.cu_seqlens.back(), batch.size());
      std::vector<int64_t> rows;
      for (size_t s = 0; s < batch.samples.size(); ++s) {
        const size_t number = batch.samples[s];
        const Sample& sample = samples[number];
        ASSERT_TRUE(seen.insert(number).second);
        const size_t first = static_cast<size_t>(batch.cu_seqlens[s]);
        const size_t count = static_cast<size_t>(batch.cu_seqlens[s + 1]) - first;
        ASSERT_EQ(count, every_row ? sample.ids.size() - 1 : last_trained(sample));
        const size_t first_trained =
            static_cast<size_t>(std::find(sample.loss_mask.begin(), sample.loss_mask.end(), 1) -
                                sample.loss_mask.begin());
        for (size_t t = 0; t < count; ++t) {
          const size_t row = first + t;
          ASSERT_EQ(batch.tokens[row], sample.ids[t]);
          ASSERT_EQ(batch.targets[row], sample.ids[t + 1]);
          ASSERT_EQ(batch.mask[row], sample.loss_mask[t + 1]);
          ASSERT_EQ(batch.versions[row], sample.versions[t + 1]);
          ASSERT_EQ(batch.temperature[row], sample.temperature);
          ASSERT_EQ(batch.rollout[row], mark(number, t + 1, 1));
          ASSERT_EQ(batch.prox[row], mark(number, t + 1, 2));
          ASSERT_EQ(batch.ref[row], mark(number, t + 1, 3));
          ASSERT_EQ(batch.teacher[row], mark(number, t + 1, 4));
          if (batch.mask[row] != 0) {
            ASSERT_EQ(batch.advantages[row], sample.advantage(t + 1));
          }
          const bool begun = t + 1 >= first_trained;
          if (every_row) {
            ASSERT_EQ(batch.weights[row], begun ? 1.0f : 0.0f);
          }
          if (every_row ? begun : batch.mask[row] != 0) rows.push_back(static_cast<int64_t>(row));
        }
      }
      ASSERT_EQ(batch.rows, rows);
      ASSERT_EQ(batch.weights.empty(), !every_row);
    }
    for (size_t i = 0; i < samples.size(); ++i) {
      EXPECT_EQ(seen.count(i), last_trained(samples[i]) > 0 ? 1u : 0u) << i;
    }
  }
}

TEST(MicroBatches, KeepRolloutsWholeAndTheBudget) {
  for (uint64_t seed = 0; seed < 40; ++seed) {
    Rng rng(seed);
    const std::vector<Sample> samples = marked_samples(seed, 1 + rng.below(30));
    const int64_t budget = 1 + static_cast<int64_t>(rng.below(60));
    std::map<int32_t, size_t> batch_of;
    const auto batches = make_micro_batches(samples, {}, budget, false);
    for (size_t b = 0; b < batches.size(); ++b) {
      const MicroBatch& batch = batches[b];
      std::set<int32_t> rollouts(batch.rollout_ids.begin(), batch.rollout_ids.end());
      if (rollouts.size() > 1) {
        ASSERT_LE(batch.size(), budget);
      }
      for (size_t s = 0; s < batch.samples.size(); ++s) {
        const int32_t id = samples[batch.samples[s]].rollout_id;
        if (id >= 0) {
          ASSERT_EQ(batch.rollout_ids[s], id);
          ASSERT_EQ(batch_of.try_emplace(id, b).first->second, b);
        } else {
          ASSERT_EQ(
              std::count(batch.rollout_ids.begin(), batch.rollout_ids.end(), batch.rollout_ids[s]),
              1);
        }
      }
    }
  }
}

TEST(MicroBatches, TakeOnlyTheSamplesNamed) {
  const std::vector<Sample> samples = marked_samples(5, 20);
  const std::vector<size_t> only{2, 3, 5, 8, 17};
  std::set<size_t> expected, seen;
  for (size_t number : only) {
    if (last_trained(samples[number]) > 0) expected.insert(number);
  }
  for (const MicroBatch& batch : make_micro_batches(samples, {}, 30, false, only)) {
    seen.insert(batch.samples.begin(), batch.samples.end());
  }
  EXPECT_EQ(seen, expected);
  EXPECT_EQ(expected.size(), 3u);  // 5 and 17 have no trained token
}

TEST(MicroBatches, WithoutOptionalListsHaveNone) {
  std::vector<Sample> samples = make_samples(3, 6);
  for (Sample& sample : samples) sample.versions.clear();
  for (const MicroBatch& batch : make_micro_batches(samples, {}, 30, false)) {
    EXPECT_TRUE(batch.rollout.empty());
    EXPECT_TRUE(batch.versions.empty());
    EXPECT_TRUE(batch.prox.empty());
    EXPECT_TRUE(batch.ref.empty());
    EXPECT_TRUE(batch.teacher.empty());
  }
}

TEST(MicroBatches, OfNothingTrainedAreNone) {
  std::vector<Sample> samples = make_samples(3, 4);
  for (Sample& sample : samples) std::fill(sample.loss_mask.begin(), sample.loss_mask.end(), 0);
  EXPECT_TRUE(make_micro_batches(samples, {}, 30, true).empty());
  EXPECT_TRUE(make_micro_batches({}, {}, 30, false).empty());
}

TEST(MicroBatches, ShowPiForProxWhereTheyAreOne) {
  const std::vector<Sample> samples = marked_samples(1, 4);
  const auto batches = make_micro_batches(samples, {marks(samples, 2), {}, {}}, 1000, false);
  ASSERT_EQ(batches.size(), 1u);
  const std::vector<float> pi(static_cast<size_t>(batches[0].size()), -1.0f);
  EXPECT_EQ(batches[0].view(pi, true).prox.data(), pi.data());
  EXPECT_EQ(batches[0].view(pi, false).prox.data(), batches[0].prox.data());
}

TEST(Scatter, BringsValuesBackToTheirTokens) {
  const std::vector<Sample> samples = marked_samples(7, 25);
  const TokenValues expected = marks(samples, 2);
  TokenValues values(samples.size());
  for (size_t i = 0; i < samples.size(); ++i) values[i].assign(samples[i].ids.size(), 0.0f);
  for (const MicroBatch& batch : make_micro_batches(samples, {expected, {}, {}}, 33, false)) {
    scatter(batch, batch.prox, values);
  }
  for (size_t i = 0; i < samples.size(); ++i) {
    for (size_t t = 0; t < values[i].size(); ++t) {
      const bool computed = t > 0 && t <= last_trained(samples[i]);
      EXPECT_EQ(values[i][t], computed ? expected[i][t] : 0.0f) << i << " " << t;
    }
  }
}

TEST(MicroBatches, GiveTrainedTokensAnEntropyGradient) {
  MicroBatch batch;
  batch.mask = {0, 1, 1, 0};
  EXPECT_EQ(batch.entropy_gradients(-0.5), (std::vector<float>{0.0f, -0.5f, -0.5f, 0.0f}));
  EXPECT_TRUE(batch.entropy_gradients(0.0).empty());
}

}  // namespace
}  // namespace leeway
