// The loss kernels on a GPU against the reference in double.

#include "cuda/loss.h"

#include <gtest/gtest.h>

#include <cmath>

#include "base/test_size.h"
#include "core/float32/loss_comparison.h"
#include "cuda/gpu_test_support.h"
#include "leeway/metrics.h"

namespace leeway::cuda {
namespace {

struct GpuLoss {
  float loss = 0.0f;
  std::vector<float> grad;
  std::vector<double> row;
};

GpuLoss run(const LossSpec& spec, const Batch& batch, double denominator) {
  const LossPlan plan = make_complete_plan(spec);
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

TEST(GpuLoss, AgreesWithTheReferenceForEveryPreset) {
  LEEWAY_NEEDS_GPU();
  const std::vector<testing::NamedSpec> specs = testing::device_specs(Catalog());
  for (const testing::NamedSpec& named : specs) {
    for (uint64_t seed = 1; seed <= 3; ++seed) {
      std::vector<int> lengths = {7, 1, 12, 3, 9, 5};
      if (seed == 3) lengths = {1500, 1, 700, 33, 1, 2048, 5};
      if (seed == 3 && testing::small_cases()) lengths = {150, 1, 70, 33, 1, 290, 5};
      Batch batch = testing::rounded(
          testing::random_batch(seed, lengths, testing::looks_at_masked(named.spec)));
      if (seed == 2) {
        batch.rollout_ids = {4, 4, 1, 2, 2, 9};
        testing::weigh(batch);
      }
      const double denominator = seed == 1 ? 17.0 : -1.0;
      const GpuLoss found = run(named.spec, batch, denominator);
      testing::expect_reference(named, batch, denominator,
                                {found.loss, found.grad, MetricSums::from_flat(found.row)});
      if (::testing::Test::HasFatalFailure()) return;
    }
  }
  std::printf("%zu presets and compositions\n", specs.size());
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
