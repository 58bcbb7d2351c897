// The formulas as GPUs run them, run here by a team of one and compared with the reference. What
// is left for a GPU to show is the launching.

#include <gtest/gtest.h>

#include <cmath>

#include "core/extensions.h"
#include "core/float32/loss_comparison.h"
#include "core/float32/sequence_math.h"
#include "core/float32/token_sums.h"
#include "core/participation.h"
#include "leeway/error.h"
#include "leeway/metrics.h"

namespace leeway::float32 {
namespace {

struct OneThread {
  int thread() const { return 0; }
  int threads() const { return 1; }
  void sync() const {}
  double sum(double value) const { return value; }
  float max(float value) const { return value; }
  float min(float value) const { return value; }
};

using HostResult = testing::LossValues;

HostResult evaluate_on_host(const LossSpec& spec, const Batch& batch, double denominator) {
  const LossPlan plan = make_complete_plan(spec);
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
  TokenSums<> sums;
  double longest = 0.0;
  for (size_t s = 0; s < S; ++s) {
    longest = std::max(longest, static_cast<double>(sequence_length(in, static_cast<int64_t>(s))));
    for (int64_t i = in.offsets[s]; i < in.offsets[s + 1]; ++i) {
      TokenIn token;
      if (!load_token(plan, in, prepared, i, states[s], token)) continue;
      const TokenOut<float> out = evaluate_alone(plan, token);
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
    result.metrics[slot] = joined(slot, result.metrics[slot], sums.slot(k));
  }
  const double x_min = result.metrics[Slot::ratio_min], x_max = result.metrics[Slot::ratio_max];
  if (x_min <= x_max) {
    for (Slot slot : {Slot::ratio_min, Slot::ratio_max, Slot::kl_max}) {
      result.metrics[slot] = finished_slot(slot, x_min, x_max);
    }
  }
  return result;
}

TEST(DeviceText, AgreesWithTheReferenceForEveryPreset) {
  for (const testing::NamedSpec& named : testing::device_specs(Catalog())) {
    for (uint64_t seed = 1; seed <= 4; ++seed) {
      Batch batch = testing::rounded(
          testing::random_batch(seed, {7, 1, 12, 3, 9, 5}, testing::looks_at_masked(named.spec)));
      if (seed == 2) batch.rollout_ids = {4, 4, 1, 2, 2, 9};
      if (seed == 3) testing::weigh(batch);
      if (seed == 4) batch = testing::behind_prompts(batch);
      const double denominator = seed == 1 ? 17.0 : -1.0;
      testing::expect_reference(named, batch, denominator,
                                evaluate_on_host(named.spec, batch, denominator));
    }
  }
}

TEST(DeviceText, NamesACorrectionThatOnlyTheHostComputes) {
  LossSpec spec = Catalog().make_spec("ppo", {});
  spec.corrections.push_back(make_correction("staleness", "0.5", {}, [](const auto&, auto effect) {
    for (auto& weight : effect.weights) weight = 0.5f;
  }));
  EXPECT_TRUE(has_complete_plan(Catalog().make_spec("ppo", {})));
  EXPECT_FALSE(has_complete_plan(spec));
  try {
    make_complete_plan(spec);
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

TEST(DeviceText, ANumberThatABoundWouldHideShows) {
  // Weights that are made alone, beside a ratio of the sequence, and of the whole sequence.
  for (const char* preset : {"grpo+tis", "ppo+icepop_tis", "reinforce+off_policy_is", "gspo+tis",
                             "grpo+tis+off_policy_is", "verl/vanilla+IS"}) {
    const LossSpec spec = Catalog().make_spec(preset, {});
    for (const double bad : {std::nan(""), kInfinity, -kInfinity}) {
      Batch batch = testing::rounded(testing::random_batch(5, {6, 4}, true));
      batch.mask.assign(batch.pi.size(), 1);
      batch.rollout[3] = bad;
      EXPECT_TRUE(std::isnan(evaluate_on_host(spec, batch, -1.0).loss)) << preset << " " << bad;
      batch.mask[3] = 0;
      EXPECT_TRUE(std::isfinite(evaluate_on_host(spec, batch, -1.0).loss)) << preset << " " << bad;
    }
  }
}

}  // namespace
}  // namespace leeway::float32
