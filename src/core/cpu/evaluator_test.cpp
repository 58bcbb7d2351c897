// The SIMD implementation against the reference: every preset, every level, awkward sizes.
//
// Tolerances: a token's float32 arithmetic is good to a few 1e-7 relative; exp and log add about
// 1e-6 at the far ends; sums over n tokens add about sqrt(n) roundings. Tokens whose float32 and
// double value fall on different sides of a bound may differ entirely; the batches here hold none.

#include "leeway/evaluator.h"

#include <gtest/gtest.h>

#include "core/test_support.h"
#include "leeway/error.h"

namespace leeway {
namespace {

using testing::NamedPreset;
using testing::random_batch;
using testing::with;

Catalog catalog;

// Values that float32 holds exactly, so that both implementations see the same numbers.
Batch rounded(Batch batch) {
  for (auto* stream : {&batch.pi, &batch.prox, &batch.rollout, &batch.ref, &batch.teacher,
                       &batch.advantages, &batch.weights}) {
    for (double& v : *stream) v = static_cast<double>(static_cast<float>(v));
  }
  return batch;
}

void expect_agrees(const NamedPreset& preset, const Batch& batch, Evaluator& evaluator,
                   const std::string& where, bool on_bin_edges = false) {
  const LossSpec spec = catalog.make_spec(preset.preset, preset.settings);
  MetricSums expected_sums, sums;
  const LossResult expected = evaluate_reference(spec, batch.view(), {}, &expected_sums, true);
  const FloatBatch floats(batch);
  std::vector<float> grad(batch.pi.size(), -77.0f);
  std::vector<uint8_t> kept(batch.pi.size(), 77);
  const double loss = evaluator.evaluate(spec, floats.view(), grad, {}, &sums, kept);

  double scale = 1e-12, absolute = 1e-12;
  for (double g : expected.grad) scale = std::max(scale, std::abs(g)), absolute += std::abs(g);
  ASSERT_NEAR(loss, expected.loss, 2e-5 * (std::abs(expected.loss) + absolute)) << where;
  for (size_t i = 0; i < grad.size(); ++i) {
    ASSERT_NEAR(grad[i], expected.grad[i], 1e-5 * std::abs(expected.grad[i]) + 2e-6 * scale)
        << where << " token " << i;
    if (expected.grad[i] == 0.0) {
      ASSERT_EQ(grad[i], 0.0f) << where << " token " << i;
    }
    const TokenTrace& trace = expected.trace[i];
    ASSERT_EQ(kept[i], trace.trained && trace.kept ? 1 : 0) << where << " token " << i;
  }
  for (int k = 0; k < kSlotCount; ++k) {
    const Slot slot = static_cast<Slot>(k);
    if (sums[slot] == expected_sums[slot]) continue;  // infinities of empty extremes
    ASSERT_NEAR(sums[slot], expected_sums[slot], 2e-5 * (1 + std::abs(expected_sums[slot])))
        << where << " slot " << k;
  }
  int64_t total = 0, expected_total = 0, moved = 0;
  for (size_t b = 0; b < kRatioBins; ++b) {
    total += sums.histogram()[b];
    expected_total += expected_sums.histogram()[b];
    moved += std::abs(sums.histogram()[b] - expected_sums.histogram()[b]);
  }
  ASSERT_EQ(total, expected_total) << where;
  if (!on_bin_edges) {
    ASSERT_LE(moved, 4 + total / 1000) << where;
  }
}

std::vector<NamedPreset> everything() {
  std::vector<NamedPreset> list = testing::native_list(catalog);
  for (NamedPreset& foreign : testing::foreign_list(catalog)) list.push_back(std::move(foreign));
  return list;
}

TEST(Evaluator, AgreesWithTheReferenceForEveryPresetAtEverySimdLevel) {
  Evaluator evaluator(2);
  ASSERT_FALSE(simd_levels().empty());
  for (const std::string& level : simd_levels()) {
    const PinSimdLevel pin(level);
    for (uint64_t seed : {1u, 2u}) {
      const Batch garbage = rounded(random_batch(seed, {17, 64, 5, 33, 100, 8}));
      const Batch clean = rounded(random_batch(seed + 10, {17, 64, 5, 33, 100, 8}, true));
      for (const NamedPreset& preset : everything()) {
        const bool foreign = preset.preset.find('/') != std::string::npos;
        expect_agrees(preset, foreign ? clean : garbage, evaluator, level + " " + preset.label());
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(Evaluator, AgreesAtLengthsAroundTheVectorWidth) {
  Evaluator evaluator(1);
  for (const std::string& level : simd_levels()) {
    const PinSimdLevel pin(level);
    for (int length = 1; length <= 70; ++length) {
      for (const char* preset : {"icepop", "grpo+tis", "gspo", "kpop"}) {
        const Batch batch =
            rounded(random_batch(static_cast<uint64_t>(length), {length, length + 1, 1}));
        expect_agrees(with(preset), batch, evaluator,
                      level + " " + preset + " length " + std::to_string(length));
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(Evaluator, AgreesWithWeightsWithoutMaskAndAcrossBlocks) {
  Evaluator evaluator(2);
  for (const char* preset : {"icepop", "dppo_kl", "ppo+icepop_tis", "cispo", "gspo"}) {
    Batch batch = random_batch(4, {5000, 3, 9001, 4096}, true);
    Rng rng(9);
    for (size_t i = 0; i < batch.pi.size(); ++i) {
      batch.weights.push_back(rng.uniform() < 0.2 ? 0.0 : rng.normal());
    }
    expect_agrees(with(preset), rounded(batch), evaluator, preset);
    batch.mask.clear();
    expect_agrees(with(preset), rounded(batch), evaluator, preset);
    batch.weights.clear();
    expect_agrees(with(preset), rounded(batch), evaluator, preset);
  }
}

TEST(Evaluator, ExactBoundsAreKeptAsInTheReference) {
  Batch batch;
  const std::vector<double> ratios = {1.0, 0.5, 2.0, 0.25, 4.0};
  for (double A : {1.0, -1.0, 0.0}) {
    for (size_t k = 0; k < ratios.size(); ++k) {
      batch.rollout.push_back(-8.0);
      batch.pi.push_back(-8.0 + static_cast<double>(static_cast<float>(std::log(ratios[k]))));
      batch.prox.push_back(batch.pi.back());
      batch.advantages.push_back(A);
    }
  }
  batch.offsets.push_back(static_cast<int64_t>(batch.pi.size()));
  Evaluator evaluator(1);
  for (const std::string& level : simd_levels()) {
    const PinSimdLevel pin(level);
    // Ratio 1 is exact in every implementation; the others depend on the last bit of exp.
    for (double bound : {1.0}) {
      const auto icepop =
          with("icepop", {{"icepop_ratio_low", bound}, {"icepop_ratio_high", bound}});
      const FloatBatch floats(batch);
      std::vector<float> grad(batch.pi.size());
      evaluator.evaluate(catalog.make_spec(icepop.preset, icepop.settings), floats.view(), grad);
      EXPECT_NE(grad[0], 0.0f) << level;
      EXPECT_EQ(grad[1], 0.0f) << level;
      EXPECT_EQ(grad[2], 0.0f) << level;
    }
    expect_agrees(with("ppo", {{"eps_low", 0.0}, {"eps_high", 0.0}}), batch, evaluator, level,
                  true);
  }
}

TEST(Evaluator, IsTheSameBitForBitWhateverTheNumberOfThreads) {
  const Batch batch = rounded(random_batch(6, {9000, 1, 12345, 77, 4096, 20000}));
  const FloatBatch floats(batch);
  for (const NamedPreset& preset : testing::native_list(catalog)) {
    const LossSpec spec = catalog.make_spec(preset.preset, preset.settings);
    std::vector<float> one(batch.pi.size()), many(batch.pi.size());
    MetricSums one_sums, many_sums;
    Evaluator single(1);
    const double loss = single.evaluate(spec, floats.view(), one, {}, &one_sums);
    for (int threads : {2, 3, 7}) {
      Evaluator evaluator(threads);
      many_sums = MetricSums();
      EXPECT_EQ(evaluator.evaluate(spec, floats.view(), many, {}, &many_sums), loss)
          << preset.label() << " " << threads;
      EXPECT_EQ(one, many) << preset.label();
      EXPECT_EQ(one_sums.flatten(), many_sums.flatten()) << preset.label();
    }
  }
}

TEST(Evaluator, MicroBatchesAddUpToTheBatch) {
  Evaluator evaluator(2);
  for (const char* preset : {"icepop", "grpo+tis", "gspo", "dppo_kl", "geo_mask"}) {
    const LossSpec spec = catalog.make_spec(preset, {});
    const Batch batch = rounded(random_batch(8, {50, 61, 7, 300, 2, 90}));
    const FloatBatch floats(batch);
    std::vector<float> whole(batch.pi.size());
    MetricSums whole_sums, sums;
    const double loss = evaluator.evaluate(spec, floats.view(), whole, {}, &whole_sums);
    const double denominator = denominator_of(spec, batch.view());
    double parts_loss = 0.0;
    size_t at = 0;
    for (int64_t s = 0; s < 6; s += 2) {
      const FloatBatch part(slice(batch, s, s + 2));
      std::vector<float> grad(part.pi.size());
      parts_loss += evaluator.evaluate(spec, part.view(), grad, denominator, &sums);
      for (float g : grad) EXPECT_FLOAT_EQ(g, whole[at++]) << preset;
    }
    EXPECT_NEAR(parts_loss, loss, 1e-6 * (1 + std::abs(loss))) << preset;
    EXPECT_EQ(sums.histogram(), whole_sums.histogram()) << preset;
    EXPECT_EQ(sums[Slot::dropped], whole_sums[Slot::dropped]) << preset;
  }
}

TEST(Evaluator, BadNumbersAreErrorsThatNameThePlace) {
  Evaluator evaluator(2);
  for (const std::string& level : simd_levels()) {
    const PinSimdLevel pin(level);
    for (float bad : {std::nanf(""), INFINITY, -INFINITY}) {
      for (const char* preset : {"icepop", "grpo+tis", "dppo_tv", "reinforce", "gspo", "kpop"}) {
        Batch batch = random_batch(5, {60, 80}, true);
        batch.mask.assign(batch.mask.size(), 1);
        FloatBatch floats(batch);
        floats.pi[60 + 33] = bad;
        std::vector<float> grad(batch.pi.size());
        try {
          evaluator.evaluate(catalog.make_spec(preset, {}), floats.view(), grad);
          FAIL() << preset << " at " << level;
        } catch (const Error& error) {
          EXPECT_NE(std::string(error.what()).find("sequence 1, position 33"), std::string::npos)
              << error.what();
        }
      }
    }
  }
  // Bounds would hide these: min(NaN, cap) is the cap.
  for (float bad : {std::nanf(""), INFINITY, -INFINITY}) {
    for (const bool in_weights : {false, true}) {
      Batch batch = random_batch(5, {60, 80}, true);
      batch.mask.assign(batch.mask.size(), 1);
      batch.weights.assign(batch.mask.size(), 1.0);
      FloatBatch floats(batch);
      (in_weights ? floats.weights : floats.rollout)[60 + 33] = bad;
      std::vector<float> grad(batch.pi.size());
      for (const char* preset : {"grpo+tis", "ppo+icepop_tis", "reinforce+off_policy_is"}) {
        try {
          evaluator.evaluate(catalog.make_spec(preset, {}), floats.view(), grad);
          FAIL() << preset;
        } catch (const Error& error) {
          EXPECT_NE(std::string(error.what())
                        .find(std::string("sequence 1, position 33: ") +
                              (in_weights ? "weights" : "rollout")),
                    std::string::npos)
              << error.what();
        }
      }
      floats.mask[60 + 33] = 0;
      EXPECT_NO_THROW(evaluator.evaluate(catalog.make_spec("grpo+tis", {}), floats.view(), grad));
    }
  }
  Batch overflow = random_batch(5, {20}, true);
  overflow.mask.assign(20, 1);
  overflow.advantages.assign(20, 1.0);
  overflow.rollout[7] = -200.0;
  const FloatBatch floats(overflow);
  std::vector<float> grad(20);
  EXPECT_THROW(evaluator.evaluate(catalog.make_spec("is", {}), floats.view(), grad), Error);
  EXPECT_NO_THROW(evaluator.evaluate(catalog.make_spec("icepop", {}), floats.view(), grad));
}

TEST(Evaluator, AnUnreadStreamOfNanIsInert) {
  Batch batch = random_batch(5, {60, 80}, true);
  FloatBatch floats(batch);
  std::fill(floats.rollout.begin(), floats.rollout.end(), std::nanf(""));
  std::vector<float> grad(batch.pi.size());
  MetricSums sums;
  Evaluator evaluator(1);
  EXPECT_NO_THROW(evaluator.evaluate(catalog.make_spec("ppo", {}), floats.view(), grad, {}, &sums));
}

}  // namespace
}  // namespace leeway
