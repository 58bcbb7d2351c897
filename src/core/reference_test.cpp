// The reference against what it is defined by: derivatives, masks, denominators, errors.

#include <gtest/gtest.h>

#include "core/quantities.h"
#include "core/test_support.h"
#include "leeway/error.h"
#include "leeway/metrics.h"

namespace leeway {
namespace {

using testing::NamedPreset;
using testing::random_batch;
using testing::with;

Catalog catalog;

LossResult evaluate(const NamedPreset& preset, const Batch& batch) {
  return evaluate_reference(catalog.make_spec(preset.preset, preset.settings), batch.view());
}

// Presets without a detached factor: their gradient is the derivative of their value. (Those with
// one are compared with autograd's numbers by the goldens.)
TEST(Reference, GradientIsTheDerivativeOfTheLoss) {
  const std::vector<NamedPreset> presets = {
      with("icepop"),
      with("ipo_kl", {{"kl_tau", 0.3}}),
      with("dppo_tv"),
      with("dppo_kl"),
      with("reinforce"),
      with("is"),
      with("ppo"),
      with("ppo", {{"dual_clip", 1.5}}),
      with("dapo"),
      with("grpo", {{"ref_kl", 0.2}}),
      with("gspo", {{"gradient", std::string("through_mean")}}),
      with("cispo_mask"),
      with("dro"),
      with("sapo"),
      with("kpop"),
      with("geo_mask"),
      with("seq_mis"),
      with("m2po"),
      with("icepop", {{"reduction", std::string("seq_mean_token_mean")}}),
      with("liger/grpo", {{"use_bias_correction_kl", true}}),
      with("liger/luspo", {{"level", std::string("sequence")}}),
      with("verl/geo_mean")};
  for (const NamedPreset& preset : presets) {
    Batch batch = random_batch(7, {9, 5, 6, 12}, true);
    const LossResult exact = evaluate(preset, batch);
    int compared = 0;
    for (size_t i = 0; i < batch.pi.size(); ++i) {
      const double step = 1e-6, center = batch.pi[i];
      batch.pi[i] = center + step;
      const double up = evaluate(preset, batch).loss;
      batch.pi[i] = center - step;
      const double down = evaluate(preset, batch).loss;
      batch.pi[i] = center;
      const double numeric = (up - down) / (2 * step);
      // A token within a step of a bound jumps; there are at most a few.
      if (std::abs(numeric - exact.grad[i]) > 1e-5 * (1 + std::abs(numeric))) continue;
      ++compared;
    }
    EXPECT_GE(compared, static_cast<int>(batch.pi.size()) - 1) << preset.label();
  }
}

TEST(Reference, WhatMaskedTokensHoldChangesNothing) {
  for (const NamedPreset& preset : testing::native_list(catalog)) {
    const Batch clean = random_batch(3, {7, 30, 1, 12}, true);
    Batch dirty = clean;
    for (size_t i = 0; i < dirty.pi.size(); ++i) {
      if (dirty.mask[i]) continue;
      for (auto* stream : {&dirty.pi, &dirty.prox, &dirty.rollout, &dirty.ref, &dirty.teacher,
                           &dirty.advantages}) {
        (*stream)[i] = i % 2 == 0 ? std::nan("") : kInfinity;
      }
    }
    const LossSpec spec = catalog.make_spec(preset.preset, preset.settings);
    MetricSums clean_sums, dirty_sums;
    const LossResult a = evaluate_reference(spec, clean.view(), {}, &clean_sums);
    const LossResult b = evaluate_reference(spec, dirty.view(), {}, &dirty_sums);
    EXPECT_EQ(a.loss, b.loss) << preset.label();
    EXPECT_EQ(a.grad, b.grad) << preset.label();
    EXPECT_EQ(clean_sums.flatten(), dirty_sums.flatten()) << preset.label();
  }
}

TEST(Reference, NanOnATrainedTokenNamesSequenceAndPosition) {
  for (const char* stream : {"pi", "rollout", "advantages"}) {
    for (double bad : {std::nan(""), kInfinity, -kInfinity}) {
      Batch batch = random_batch(5, {6, 8}, true);
      batch.mask.assign(batch.mask.size(), 1);
      auto& values = std::string(stream) == "pi"        ? batch.pi
                     : std::string(stream) == "rollout" ? batch.rollout
                                                        : batch.advantages;
      values[6 + 3] = bad;
      try {
        evaluate(with("icepop"), batch);
        FAIL() << stream;
      } catch (const Error& error) {
        EXPECT_NE(std::string(error.what()).find("sequence 1, position 3: " + std::string(stream)),
                  std::string::npos)
            << error.what();
      }
    }
  }
}

TEST(Reference, StreamsThePresetDoesNotReadAreNotLookedAt) {
  Batch batch = random_batch(5, {6, 8}, true);
  const double loss = evaluate(with("reinforce"), batch).loss;
  for (auto* stream : {&batch.prox, &batch.rollout, &batch.ref, &batch.teacher}) {
    stream->assign(stream->size(), std::nan(""));
  }
  EXPECT_EQ(evaluate(with("reinforce"), batch).loss, loss);
  batch.prox.clear();
  EXPECT_EQ(evaluate(with("reinforce"), batch).loss, loss);
  EXPECT_THROW(evaluate(with("ppo"), batch), Error);
}

TEST(Reference, ALossThatOverflowsIsAnErrorAndADroppedTokenIsNot) {
  Batch batch = random_batch(5, {6}, true);
  batch.mask.assign(6, 1);
  batch.pi[2] = -1.0;
  batch.rollout[2] = -1000.0;
  EXPECT_THROW(evaluate(with("is"), batch), Error);
  const LossResult kept = evaluate(with("icepop"), batch);
  EXPECT_TRUE(std::isfinite(kept.loss));
  EXPECT_EQ(kept.grad[2], 0.0);
}

// Bounds are compared in float32: what equals the bound there is kept.
TEST(Reference, ARatioEqualToABoundIsKept) {
  for (const char* preset : {"icepop", "ipo_kl"}) {
    const std::string prefix = std::string(preset) == "icepop" ? "icepop" : "ipo";
    Batch batch;
    batch.offsets = {0, 4};
    const double ln2 = static_cast<double>(std::log(2.0f));
    batch.rollout = {-3.0, -3.0, -3.0, -3.0};
    batch.pi = {-3.0 + ln2, -3.0 - ln2, -3.0 + ln2 + 1e-5, -3.0 - ln2 - 1e-5};
    batch.advantages = {1, 1, 1, 1};
    const LossResult result = evaluate(
        with(preset, {{prefix + "_ratio_low", 0.5}, {prefix + "_ratio_high", 2.0}}), batch);
    EXPECT_NE(result.grad[0], 0.0);
    EXPECT_NE(result.grad[1], 0.0);
    EXPECT_EQ(result.grad[2], 0.0);
    EXPECT_EQ(result.grad[3], 0.0);
  }
  Batch batch;
  batch.offsets = {0, 2};
  batch.pi = {std::log(0.5), std::log(0.25)};
  batch.rollout = {std::log(0.25), std::log(0.5)};
  batch.advantages = {1, -1};
  EXPECT_NE(
      evaluate(with("dppo_tv", {{"dppo_diff_high", 0.25}, {"dppo_diff_low", 0.25}}), batch).grad[0],
      0.0);
  EXPECT_EQ(evaluate(with("dppo_tv", {{"dppo_diff_high", 0.249}, {"dppo_diff_low", 0.25}}), batch)
                .grad[0],
            0.0);
  EXPECT_NE(evaluate(with("dppo_tv", {{"dppo_diff_high", 0.249}, {"dppo_diff_low", 0.25}}), batch)
                .grad[1],
            0.0);
}

// Cutting a batch anywhere changes nothing but rounding, because denominators are global.
TEST(Reference, MicroBatchesAddUpToTheBatch) {
  for (const NamedPreset& preset : testing::native_list(catalog)) {
    LossSpec spec = catalog.make_spec(preset.preset, preset.settings);
    Batch batch = random_batch(11, {13, 1, 7, 40, 3, 22, 9});
    MetricSums whole_sums;
    const LossResult whole = evaluate_reference(spec, batch.view(), {}, &whole_sums);
    if (spec.m2_threshold) {
      // M2PO decides over the whole batch, before it is cut.
      const double denominator = denominator_of(spec, batch.view());
      batch.mask = narrow_mask(spec, batch.view());
      spec.m2_threshold.reset();
      EXPECT_GE(denominator, 1.0);
    }
    MetricSums sums;
    double loss = 0.0, denominator = 0.0;
    std::vector<double> grad;
    const std::vector<int64_t> cuts = {0, 1, 4, 7};
    for (size_t k = 0; k + 1 < cuts.size(); ++k) {
      denominator += denominator_of(spec, slice(batch, cuts[k], cuts[k + 1]).view());
    }
    if (spec.reduction.kind != ReductionKind::sum && preset.preset != "m2po") {
      EXPECT_DOUBLE_EQ(denominator, whole.denominator) << preset.label();
    }
    for (size_t k = 0; k + 1 < cuts.size(); ++k) {
      const Batch part = slice(batch, cuts[k], cuts[k + 1]);
      const LossResult result = evaluate_reference(spec, part.view(), whole.denominator, &sums);
      loss += result.loss;
      grad.insert(grad.end(), result.grad.begin(), result.grad.end());
    }
    EXPECT_NEAR(loss, whole.loss, 1e-12 * (1 + std::abs(whole.loss))) << preset.label();
    for (size_t i = 0; i < grad.size(); ++i) {
      EXPECT_NEAR(grad[i], whole.grad[i], 1e-12 * (1 + std::abs(whole.grad[i]))) << preset.label();
    }
    // Tokens M2PO takes out before the cut are masked in the parts and dropped in the whole.
    if (preset.preset == "m2po") continue;
    const auto a = sums.flatten(), b = whole_sums.flatten();
    for (size_t i = 0; i < a.size(); ++i) {
      if (a[i] == b[i]) continue;  // infinities of empty extremes
      EXPECT_NEAR(a[i], b[i], 1e-9 * (1 + std::abs(b[i]))) << preset.label() << " slot " << i;
    }
  }
}

TEST(Reference, AZeroWeightIsAMaskAndOtherWeightsMultiply) {
  for (const char* preset : {"icepop", "ipo_kl", "gspo", "grpo+tis", "dppo_kl"}) {
    const Batch plain = random_batch(2, {8, 11, 6}, true);
    Batch weighted = plain, masked = plain;
    weighted.weights.assign(plain.pi.size(), 1.0);
    for (size_t i = 0; i < plain.pi.size(); i += 3) weighted.weights[i] = 0.0, masked.mask[i] = 0;
    EXPECT_EQ(evaluate(with(preset), weighted).loss, evaluate(with(preset), masked).loss) << preset;
    EXPECT_EQ(evaluate(with(preset), weighted).grad, evaluate(with(preset), masked).grad) << preset;

    Batch tripled = plain;
    tripled.weights.assign(plain.pi.size(), -3.0);
    EXPECT_NEAR(evaluate(with(preset), tripled).loss, -3.0 * evaluate(with(preset), plain).loss,
                1e-12);
  }
}

Batch two_sequences() {
  Batch batch;
  batch.offsets = {0, 2, 6, 7};
  batch.pi = {-1, -1, -1, -1, -1, -1, -9};
  batch.rollout = batch.pi;
  batch.advantages = {1, 1, 2, 2, 2, 2, 100};
  batch.mask = {1, 1, 1, 1, 1, 0, 0};
  return batch;
}

TEST(Reference, ReductionsDivideByWhatTheySay) {
  const Batch batch = two_sequences();  // policy terms -1, -1 | -2, -2, -2 | nothing trained
  auto loss = [&](const char* reduction, double fixed_length = 0) {
    std::vector<std::pair<std::string, Value>> settings{{"reduction", std::string(reduction)}};
    if (fixed_length > 0) settings.emplace_back("fixed_length", fixed_length);
    return evaluate(with("is", settings), batch).loss;
  };
  EXPECT_DOUBLE_EQ(loss("token_mean"), -8.0 / 5);
  EXPECT_DOUBLE_EQ(loss("seq_mean_token_mean"), -(1.0 + 2.0) / 2);
  EXPECT_DOUBLE_EQ(loss("seq_mean_token_sum"), -8.0 / 2);
  EXPECT_DOUBLE_EQ(loss("fixed_length", 10), -8.0 / 20);
  EXPECT_DOUBLE_EQ(loss("sum"), -8.0);
}

TEST(Reference, SamplesOfOneRolloutCountAsOneSequence) {
  Batch batch = two_sequences();
  batch.rollout_ids = {4, 4, 9};
  EXPECT_DOUBLE_EQ(
      evaluate(with("is", {{"reduction", std::string("seq_mean_token_mean")}}), batch).loss,
      -8.0 / 5);
  EXPECT_DOUBLE_EQ(
      evaluate(with("is", {{"reduction", std::string("seq_mean_token_sum")}}), batch).loss, -8.0);
  EXPECT_DOUBLE_EQ(evaluate(with("is"), batch).loss, -8.0 / 5);
}

TEST(Reference, KeptDenominatorsLeaveOutWhatWasDropped) {
  Batch batch = two_sequences();
  batch.pi[0] = -0.1;  // ratio 2.46
  const auto tight = [](const char* denominator) {
    return with("icepop", {{"icepop_ratio_high", 2.0}, {"denominator", std::string(denominator)}});
  };
  EXPECT_DOUBLE_EQ(evaluate(tight("original"), batch).loss, -7.0 / 5);
  EXPECT_DOUBLE_EQ(evaluate(tight("kept"), batch).loss, -7.0 / 4);
}

TEST(Reference, AnAllMaskedBatchHasLossZeroAndAnEmptyOneIsRefused) {
  Batch batch = two_sequences();
  batch.mask.assign(batch.mask.size(), 0);
  for (const NamedPreset& preset : testing::native_list(catalog)) {
    Batch full = random_batch(1, {4, 3});
    full.mask.assign(full.mask.size(), 0);
    EXPECT_EQ(evaluate(preset, full).loss, 0.0) << preset.label();
  }
  Batch empty;
  EXPECT_THROW(evaluate(with("icepop"), empty), Error);
}

TEST(Reference, M2poKeepsAsManyTokensAsItsThresholdAllows) {
  for (double threshold : {1e-9, 0.01, 0.04, 0.3, 100.0}) {
    const Batch batch = random_batch(21, {30, 40, 20}, true);
    const LossSpec spec = catalog.make_spec("m2po", {{"m2_threshold", threshold, ""}});
    const auto mask = narrow_mask(spec, batch.view());
    double sum = 0, kept = 0, smallest_dropped = kInfinity, largest_kept = 0;
    for (size_t i = 0; i < mask.size(); ++i) {
      if (!batch.mask[i]) continue;
      const double m2 = std::pow(batch.rollout[i] - batch.prox[i], 2);
      if (mask[i]) {
        sum += m2, kept += 1, largest_kept = std::max(largest_kept, m2);
      } else {
        smallest_dropped = std::min(smallest_dropped, m2);
      }
    }
    ASSERT_GE(kept, 1);
    EXPECT_LE(largest_kept, smallest_dropped);
    if (kept > 1) {
      EXPECT_LT(sum / kept, threshold);
    }
    if (smallest_dropped < kInfinity) {
      EXPECT_GE((sum + smallest_dropped) / (kept + 1), threshold);
    }
  }
}

TEST(Reference, PenaltiesOfIpoAndDppoDifferOnDroppedTokens) {
  Batch batch;
  batch.offsets = {0, 1};
  batch.pi = {-0.1};
  batch.rollout = {-3.0};  // dropped by either gate
  batch.advantages = {1.0};
  EXPECT_EQ(evaluate(with("ipo_kl", {{"kl_tau", 0.5}}), batch).loss, 0.0);
  EXPECT_NEAR(evaluate(with("dppo_kl", {{"kl_tau", 0.5}}), batch).loss, 0.5 * 2.9 * 2.9, 1e-12);
}

TEST(Quantities, K3DoesNotCancelNearZero) {
  for (double x : {1e-9, -1e-8, 1e-5, -1e-3}) EXPECT_NEAR(k3(x) / (0.5 * x * x), 1.0, 1e-3);
  EXPECT_EQ(k3(0.0), 0.0);
}

TEST(Quantities, BinaryKlIsZeroOnlyForEqualsAndInfiniteAgainstCertainty) {
  EXPECT_NEAR(binary_kl(-0.7, -0.7), 0.0, 1e-15);
  const double p = 0.3, q = 0.6;
  EXPECT_NEAR(binary_kl(std::log(p), std::log(q)),
              p * std::log(p / q) + (1 - p) * std::log((1 - p) / (1 - q)), 1e-15);
  EXPECT_TRUE(std::isinf(binary_kl(-0.5, 0.0)));
  EXPECT_EQ(binary_kl(0.0, 0.0), 0.0);
}

}  // namespace
}  // namespace leeway
