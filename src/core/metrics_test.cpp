// Metrics computed by hand, and merging them.

#include "leeway/metrics.h"

#include <gtest/gtest.h>

#include <map>

#include "core/test_support.h"

namespace leeway {
namespace {

using testing::random_batch;

const Catalog catalog;

std::map<std::string, double> metrics_of(const std::string& preset, const Settings& settings,
                                         const Batch& batch) {
  const LossSpec spec = catalog.make_spec(preset, settings);
  MetricSums sums;
  evaluate_reference(spec, batch.view(), {}, &sums);
  const auto list = finalize_metrics(spec, sums, !batch.rollout.empty(), !batch.ref.empty(),
                                     !batch.teacher.empty());
  return {list.begin(), list.end()};
}

Batch small() {
  Batch batch;
  batch.offsets = {0, 4, 5};
  batch.pi = {-1.0, -0.1, -3.0, -1.0, -2.0};
  batch.rollout = {-1.0, -3.0, -1.0, -1.5, -9.0};
  batch.advantages = {1.0, 1.0, -1.0, 0.0, 5.0};
  batch.mask = {1, 1, 1, 1, 0};
  return batch;
}

TEST(Metrics, FollowTheirDefinitions) {
  const auto m = metrics_of("icepop", {}, small());
  auto k3 = [](double x) { return std::exp(x) - 1 - x; };
  const double kl[] = {0.0, k3(2.9), k3(-2.0), k3(0.5)};
  EXPECT_NEAR(m.at("mismatch_kl"), (kl[1] + kl[2] + kl[3]) / 4, 1e-12);
  EXPECT_NEAR(m.at("mismatch_kl_positive"), kl[1] / 2, 1e-12);
  EXPECT_NEAR(m.at("mismatch_kl_negative"), kl[2], 1e-12);
  EXPECT_NEAR(m.at("mismatch_kl_max"), kl[1], 1e-12);
  EXPECT_NEAR(m.at("masked_mismatch_kl"), (kl[1] + kl[2]) / 2, 1e-12);
  EXPECT_NEAR(m.at("unmasked_mismatch_kl"), kl[3] / 2, 1e-12);
  EXPECT_EQ(m.at("is_masked"), 0.5);
  EXPECT_EQ(m.at("is_masked_low"), 0.25);
  EXPECT_EQ(m.at("is_masked_high"), 0.25);
  EXPECT_EQ(m.at("is_masked_positive"), 0.5);
  EXPECT_EQ(m.at("is_masked_negative"), 1.0);
  EXPECT_EQ(m.at("kept_share"), 0.5);
  const double r[] = {1.0, std::exp(2.9), std::exp(-2.0), std::exp(0.5)};
  EXPECT_NEAR(m.at("ratio_mean"), (r[0] + r[1] + r[2] + r[3]) / 4, 1e-12);
  EXPECT_NEAR(m.at("ratio_min"), r[2], 1e-15);
  EXPECT_NEAR(m.at("ratio_max"), r[1], 1e-12);
  EXPECT_NEAR(m.at("ratio_p99"), r[1], 1e-12);
  double sum = 0, squares = 0;
  for (double x : r) sum += x, squares += x * x;
  EXPECT_NEAR(m.at("effective_sample_size"), sum * sum / (4 * squares), 1e-12);
  EXPECT_NEAR(m.at("update_effective_sample_size"),
              (1 + r[3]) * (1 + r[3]) / (4 * (1 + r[3] * r[3])), 1e-12);
  EXPECT_EQ(m.at("tokens"), 4.0);
  EXPECT_EQ(m.at("sequences"), 1.0);
}

TEST(Metrics, ClipFractionsAreNamedApart) {
  Batch batch = small();
  batch.prox = batch.rollout;
  const auto m = metrics_of("ppo", {{"dual_clip", 3.0, ""}}, batch);
  EXPECT_EQ(m.at("clip_fraction_band"), 0.75);  // 2.9 and 0.5 above, -2 below
  EXPECT_EQ(m.at("clip_fraction_high"), 0.5);
  EXPECT_EQ(m.at("clip_fraction_low"), 0.25);
  EXPECT_EQ(m.at("clip_fraction_binding"), 0.5);  // 0.5 has advantage 0
  EXPECT_EQ(m.at("clip_fraction_signed"), 0.5);
  EXPECT_EQ(m.at("clip_fraction_dual"), 0.0);
  EXPECT_EQ(m.at("kept_share"), 0.5);
  EXPECT_EQ(metrics_of("icepop", {}, batch).count("clip_fraction_band"), 0u);
  EXPECT_EQ(metrics_of("cispo", {}, batch).count("clip_fraction_binding"), 0u);
}

TEST(Metrics, MergingIsExact) {
  const LossSpec spec = catalog.make_spec("dppo_kl", {});
  const Batch batch = random_batch(2, {300, 20, 45, 600});
  MetricSums whole, left, right;
  evaluate_reference(spec, batch.view(), {}, &whole);
  evaluate_reference(spec, slice(batch, 0, 2).view(), 100.0, &left);
  evaluate_reference(spec, slice(batch, 2, 4).view(), 100.0, &right);
  MetricSums empty;
  empty.merge(left);
  empty.merge(right);
  const MetricSums joined = MetricSums::from_flat(empty.flatten());
  const auto a = finalize_metrics(spec, whole, true, true, true);
  const auto b = finalize_metrics(spec, joined, true, true, true);
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_NEAR(a[i].second, b[i].second, 1e-12 * (1 + std::abs(a[i].second))) << a[i].first;
  }
}

TEST(Metrics, P99IsNeverBelowTheTrueOneAndAtMostABinAbove) {
  for (uint64_t seed : {1u, 2u, 3u}) {
    const Batch batch = random_batch(seed, {4000}, true);
    std::vector<double> ratios;
    for (size_t i = 0; i < batch.pi.size(); ++i) {
      if (batch.mask[i]) ratios.push_back(std::exp(batch.pi[i] - batch.rollout[i]));
    }
    std::sort(ratios.begin(), ratios.end());
    const double exact =
        ratios[static_cast<size_t>(std::ceil(0.99 * static_cast<double>(ratios.size()))) - 1];
    const double p99 = metrics_of("icepop", {}, batch).at("ratio_p99");
    EXPECT_GE(p99, exact * (1 - 1e-6));
    EXPECT_LE(p99, exact * (1 + 1.0 / 32) * (1 + 1e-6));
  }
}

TEST(Metrics, RatioBinsCoverTheLine) {
  EXPECT_EQ(ratio_bin(0.0f), 0);
  EXPECT_EQ(ratio_bin(-1.0f), 0);
  EXPECT_EQ(ratio_bin(std::nanf("")), 0);
  EXPECT_EQ(ratio_bin(1e30f), kRatioBins - 1);
  for (int bin = 1; bin < kRatioBins - 1; ++bin) {
    const float edge = static_cast<float>(ratio_bin_upper(bin));
    EXPECT_EQ(ratio_bin(edge), bin + 1);
    EXPECT_EQ(ratio_bin(std::nextafter(edge, 0.0f)), bin);
  }
}

TEST(Metrics, EachHasOneNameAndADefinition) {
  std::map<std::string, int> names;
  for (const MetricInfo& info : metric_table()) {
    EXPECT_EQ(++names[info.name], 1) << info.name;
    EXPECT_GT(std::string(info.definition).size(), 10u) << info.name;
  }
}

}  // namespace
}  // namespace leeway
