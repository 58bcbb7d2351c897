// The text that the kernels run, run here by a team of one and held against the reference. What is
// left for a GPU to show is the launching.

#include <gtest/gtest.h>

#include <cmath>

#include "core/cuda/sequence_math.h"
#include "core/cuda/token_sums.h"
#include "core/extensions.h"
#include "core/participation.h"
#include "core/test_support.h"
#include "leeway/error.h"
#include "leeway/metrics.h"

namespace leeway::cuda {
namespace {

struct OneThread {
  int thread() const { return 0; }
  int threads() const { return 1; }
  void sync() const {}
  double sum(double value) const { return value; }
  float max(float value) const { return value; }
  float min(float value) const { return value; }
};

struct HostResult {
  double loss = 0.0;
  std::vector<float> grad;
  MetricSums metrics;
};

HostResult evaluate_on_host(const LossSpec& spec, const Batch& batch, double denominator) {
  const LossPlan plan = make_loss_plan(spec);
  const FloatBatch floats(batch);
  const BatchView<float> view = floats.view();
  const size_t n = floats.pi.size(), S = static_cast<size_t>(view.sequence_count());
  LossBatch in;
  in.tokens = static_cast<int64_t>(n);
  in.sequences = static_cast<int64_t>(S);
  in.offsets = view.offsets.data();
  for (int k = 0; k < kStreamCount; ++k) {
    const auto stream = view.stream(static_cast<Stream>(k));
    in.streams[k] = stream.empty() ? nullptr : stream.data();
  }
  in.advantages = view.advantages.data();
  in.weights = view.weights.empty() ? nullptr : view.weights.data();
  in.mask = view.mask.empty() ? nullptr : view.mask.data();
  in.versions = view.versions.empty() ? nullptr : view.versions.data();
  in.rollout_ids = view.rollout_ids.empty() ? nullptr : view.rollout_ids.data();

  std::vector<SequenceState> states(S);
  std::vector<uint8_t> trained(n), flags(n);
  std::vector<float> weights(n), through(n);
  Prepared prepared;
  prepared.sequences = states.data();
  OneThread team;
  if (plan.token_level) {
    for (size_t s = 0; s < S; ++s) count_sequence(plan, in, prepared, s, team);
  } else {
    prepared = {states.data(), trained.data(), flags.data(), weights.data(), through.data()};
    if (plan.m2_threshold >= 0.0) {
      const std::vector<uint8_t> kept = narrow_mask(spec, view), part = participating(spec, view);
      for (size_t i = 0; i < n; ++i) {
        if (part[i] && !kept[i]) flags[i] = kPolicyDropped | kPenaltyDropped;
      }
    }
    for (size_t s = 0; s < S; ++s) prepare_first(plan, in, prepared, s, team);
    const double mean = mean_weight(plan, states.data(), in.sequences, team);
    for (size_t s = 0; s < S; ++s) prepare_second(plan, in, prepared, mean, s, team);
    if (plan.covariance_ratio >= 0.0) {
      const auto selected = select_by_covariance(spec, view, std::span<const uint8_t>(trained));
      for (size_t i = 0; i < n; ++i)
        if (selected[i]) flags[i] |= kSelected;
    }
  }
  set_scales(plan, in, prepared, denominator, team);

  HostResult result;
  result.grad.assign(n, 0.0f);
  TokenSums sums;
  double longest = 0.0;
  for (size_t s = 0; s < S; ++s) {
    longest = std::max(longest, static_cast<double>(in.offsets[s + 1] - in.offsets[s]));
    for (int64_t i = in.offsets[s]; i < in.offsets[s + 1]; ++i) {
      TokenIn token;
      if (!load_token(plan, in, prepared, i, states[s], token)) continue;
      const TokenOut out = evaluate_token(plan, token);
      if (!out.trained) continue;
      result.grad[static_cast<size_t>(i)] = out.grad;
      through[static_cast<size_t>(i)] = out.through;
      const int bin = sums.add(plan, in, i, token, out);
      if (bin >= 0) result.metrics.histogram()[static_cast<size_t>(bin)] += 1;
      states[s].seen = 1;
      if (out.kept) states[s].seen_kept = 1;
    }
  }
  result.loss = sums.loss;
  for (size_t s = 0; s < S; ++s) {
    result.loss += finish_sequence(plan, in, prepared, longest, static_cast<int64_t>(s),
                                   result.grad.data(), team);
    result.metrics[Slot::sequences] += states[s].seen;
    result.metrics[Slot::sequences_dropped] += states[s].seen && !states[s].seen_kept;
  }
  if (sums.not_finite) result.loss = std::nan("");
  for (int k = 0; k < kSlotCount; ++k) {
    const Slot slot = static_cast<Slot>(k);
    if (slot == Slot::sequences || slot == Slot::sequences_dropped) continue;
    if (slot < Slot::first_extreme) {
      result.metrics[slot] += sums.slot(slot);
    } else if (sums.slot(Slot::tokens) > 0) {
      result.metrics.raise(slot, sums.slot(slot));
    }
  }
  return result;
}

void expect_near(double actual, double wanted, double tolerance, const std::string& what) {
  if (std::isnan(wanted) && std::isnan(actual)) return;
  if (std::isinf(wanted) && wanted == actual) return;
  EXPECT_NEAR(actual, wanted, tolerance * std::max(1.0, std::abs(wanted))) << what;
}

void compare(const testing::NamedPreset& named, const LossSpec& spec, const Batch& batch,
             double denominator) {
  MetricSums wanted_sums;
  const LossResult wanted =
      evaluate_reference(spec, batch.view(),
                         denominator < 0 ? std::nullopt : std::optional(denominator), &wanted_sums);
  const HostResult actual = evaluate_on_host(spec, batch, denominator);
  expect_near(actual.loss, wanted.loss, 3e-5, named.label() + ": loss");
  for (size_t i = 0; i < wanted.grad.size(); ++i) {
    EXPECT_NEAR(actual.grad[i], wanted.grad[i], 5e-5 * std::max(1.0, std::abs(wanted.grad[i])))
        << named.label() << ": position " << i;
  }
  const auto wanted_metrics = finalize_metrics(spec, wanted_sums, true, true, true);
  const auto metrics = finalize_metrics(spec, actual.metrics, true, true, true);
  for (size_t m = 0; m < metrics.size(); ++m) {
    expect_near(metrics[m].second, wanted_metrics[m].second, 1e-4,
                named.label() + ": " + metrics[m].first);
  }
}

TEST(DeviceText, AgreesWithTheReferenceForEveryPreset) {
  const Catalog catalog;
  std::vector<testing::NamedPreset> list = testing::native_list(catalog);
  for (auto& foreign : testing::foreign_list(catalog)) list.push_back(foreign);
  int compared = 0;
  for (const testing::NamedPreset& named : list) {
    const LossSpec spec = catalog.make_spec(named.preset, named.settings);
    try {
      make_loss_plan(spec);
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("on the CPU"), std::string::npos);
      continue;
    }
    ++compared;
    for (uint64_t seed = 1; seed <= 3; ++seed) {
      Batch batch = testing::rounded(
          testing::random_batch(seed, {7, 1, 12, 3, 9, 5}, testing::looks_at_masked(spec)));
      if (seed == 2) batch.rollout_ids = {4, 4, 1, 2, 2, 9};
      if (seed == 3) {
        batch.weights.assign(batch.pi.size(), 1.0);
        for (size_t i = 0; i < batch.weights.size(); ++i) batch.weights[i] = 0.25 * double(i % 4);
      }
      compare(named, spec, batch, seed == 1 ? 17.0 : -1.0);
    }
  }
  EXPECT_GE(compared, 110);
}

TEST(DeviceText, NamesACorrectionThatOnlyTheHostComputes) {
  LossSpec spec = Catalog().make_spec("ppo", {});
  spec.corrections.push_back(make_correction("staleness", "0.5", {}, [](const auto&, auto effect) {
    for (auto& weight : effect.weights) weight = 0.5f;
  }));
  try {
    make_loss_plan(spec);
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("staleness"), std::string::npos);
  }
}

TEST(DeviceText, ANumberThatIsNotFiniteShows) {
  const LossSpec spec = Catalog().make_spec("icepop", {});
  Batch batch = testing::rounded(testing::random_batch(5, {6, 4}, true));
  batch.mask.assign(batch.pi.size(), 1);
  batch.rollout[3] = std::nan("");
  EXPECT_TRUE(std::isnan(evaluate_on_host(spec, batch, -1.0).loss));
  batch.mask[3] = 0;
  EXPECT_TRUE(std::isfinite(evaluate_on_host(spec, batch, -1.0).loss));
}

}  // namespace
}  // namespace leeway::cuda
