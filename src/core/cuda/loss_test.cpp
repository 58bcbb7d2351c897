// The loss kernels on a GPU against the reference in double.

#include "core/cuda/loss.h"

#include <gtest/gtest.h>

#include <cmath>

#include "core/cuda/gpu_test_support.h"
#include "core/test_support.h"
#include "leeway/metrics.h"

namespace leeway::cuda {
namespace {

struct GpuLoss {
  float loss = 0.0f;
  std::vector<float> grad;
  std::vector<double> row;
};

GpuLoss run(const LossSpec& spec, const Batch& batch, double denominator) {
  const LossPlan plan = make_loss_plan(spec);
  const FloatBatch floats(batch);
  const DeviceBatch device(floats.view());
  const LossBatch& in = device.batch();
  const int64_t bytes = loss_workspace_bytes(plan, in.tokens, in.sequences);
  const DeviceArray<char> memory(static_cast<size_t>(bytes));
  const DeviceArray<float> grad(static_cast<size_t>(in.tokens)), loss(1);
  const DeviceArray<double> row(MetricSums::kFlatSize);
  policy_loss(plan, in, denominator, grad.data(), loss.data(), row.data(),
              lay_out_loss(plan, in.tokens, in.sequences, memory.data()), false, nullptr);
  return {loss.values()[0], grad.values(), row.values()};
}

void expect_same(double actual, double wanted, double tolerance, const std::string& what) {
  if (std::isnan(wanted) ? std::isnan(actual) : std::isinf(wanted) && wanted == actual) return;
  EXPECT_NEAR(actual, wanted, tolerance * std::max(1.0, std::abs(wanted))) << what;
}

void compare(const std::string& label, const LossSpec& spec, const Batch& batch,
             double denominator) {
  MetricSums sums;
  const LossResult wanted = evaluate_reference(
      spec, batch.view(), denominator < 0 ? std::nullopt : std::optional(denominator), &sums);
  const GpuLoss actual = run(spec, batch, denominator);
  expect_same(actual.loss, wanted.loss, 3e-5, label + ": loss");
  for (size_t i = 0; i < wanted.grad.size(); ++i) {
    ASSERT_NEAR(actual.grad[i], wanted.grad[i], 5e-5 * std::max(1.0, std::abs(wanted.grad[i])))
        << label << ": position " << i;
  }
  const auto wanted_metrics = finalize_metrics(spec, sums, true, true, true);
  const auto metrics = finalize_metrics(spec, MetricSums::from_flat(actual.row), true, true, true);
  for (size_t m = 0; m < metrics.size(); ++m) {
    expect_same(metrics[m].second, wanted_metrics[m].second, 1e-4, label + ": " + metrics[m].first);
  }
}

TEST(GpuLoss, AgreesWithTheReferenceForEveryPreset) {
  LEEWAY_NEEDS_GPU();
  const Catalog catalog;
  std::vector<testing::NamedPreset> list = testing::native_list(catalog);
  for (auto& foreign : testing::foreign_list(catalog)) list.push_back(foreign);
  int compared = 0;
  for (const testing::NamedPreset& named : list) {
    const LossSpec spec = catalog.make_spec(named.preset, named.settings);
    try {
      make_loss_plan(spec);
    } catch (const Error&) {
      continue;
    }
    ++compared;
    for (uint64_t seed = 1; seed <= 3; ++seed) {
      const std::vector<int> lengths = seed == 3 ? std::vector<int>{1500, 1, 700, 33, 1, 2048, 5}
                                                 : std::vector<int>{7, 1, 12, 3, 9, 5};
      Batch batch =
          testing::rounded(testing::random_batch(seed, lengths, testing::looks_at_masked(spec)));
      if (seed == 2) batch.rollout_ids = {4, 4, 1, 2, 2, 9};
      if (seed == 2) {
        batch.weights.assign(batch.pi.size(), 1.0);
        for (size_t i = 0; i < batch.weights.size(); ++i) {
          batch.weights[i] = 0.25 * static_cast<double>(i % 4);
        }
      }
      compare(named.label(), spec, batch, seed == 1 ? 17.0 : -1.0);
      if (::testing::Test::HasFatalFailure()) return;
    }
  }
  std::printf("%d presets and compositions\n", compared);
  EXPECT_GE(compared, 110);
}

TEST(GpuLoss, RepeatsBitForBit) {
  LEEWAY_NEEDS_GPU();
  const Catalog catalog;
  const Batch batch = testing::rounded(testing::random_batch(9, std::vector<int>(300, 701)));
  for (const char* preset : {"icepop", "gspo", "ppo+tis", "m2po", "verl/kl_cov"}) {
    const LossSpec spec = catalog.make_spec(preset, {});
    const GpuLoss first = run(spec, batch, -1.0), second = run(spec, batch, -1.0);
    EXPECT_EQ(first.loss, second.loss) << preset;
    EXPECT_EQ(first.grad, second.grad) << preset;
    for (size_t k = 0; k < first.row.size(); ++k) {
      if (!std::isnan(first.row[k])) {
        EXPECT_EQ(first.row[k], second.row[k]) << preset << " " << k;
      }
    }
  }
}

TEST(GpuLoss, WhatIsNotFiniteShowsAndWhatIsMaskedDoesNot) {
  LEEWAY_NEEDS_GPU();
  const LossSpec spec = Catalog().make_spec("icepop", {});
  Batch batch = testing::rounded(testing::random_batch(5, {6, 4}, true));
  batch.mask.assign(batch.pi.size(), 1);
  batch.rollout[3] = std::nan("");
  EXPECT_TRUE(std::isnan(run(spec, batch, -1.0).loss));
  batch.mask[3] = 0;
  EXPECT_TRUE(std::isfinite(run(spec, batch, -1.0).loss));
  batch.mask.assign(batch.pi.size(), 0);
  const GpuLoss nothing = run(spec, batch, -1.0);
  EXPECT_EQ(nothing.loss, 0.0f);
  EXPECT_EQ(nothing.grad, std::vector<float>(batch.pi.size(), 0.0f));
}

}  // namespace
}  // namespace leeway::cuda
