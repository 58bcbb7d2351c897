// A made-up surrogate, gate quantity and metric, written once for all devices
// (made_up_rules-inl.h) and once in double (below): both the scalar code that GPUs run and the
// vector code of every SIMD level compute them without any other change.

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "core/cpu/token_kernel.h"
#include "core/float32/plan.h"
#include "core/float32/token_sums.h"
#include "core/test_support.h"
#include "leeway/evaluator.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/float32/made_up_rules_test.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "core/cpu/token_loop-inl.h"

HWY_BEFORE_NAMESPACE();
namespace leeway {
namespace HWY_NAMESPACE {

#define LEEWAY_FORMULA HWY_INLINE
#include "core/float32/made_up_rules-inl.h"
#undef LEEWAY_FORMULA

void run_made_up(const LossPlan& plan, const TokenInputs& in, size_t n,
                 TokenTotals<MadeUpRules::kSlots>& sums, KernelHistogram* histogram) {
  run_tokens<AnyPlan<MadeUpRules>>(plan, in, SequenceNumbers{}, n, sums, histogram);
}

}  // namespace HWY_NAMESPACE
}  // namespace leeway
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace leeway {
namespace float32 {

#define LEEWAY_FORMULA LEEWAY_HOST_DEVICE
#include "core/float32/made_up_rules-inl.h"
#undef LEEWAY_FORMULA

}  // namespace float32

HWY_EXPORT(run_made_up);

namespace {

constexpr int kSlots = kSlotCount + 1, kMadeUpSlot = kSlotCount;
constexpr double kGateHigh = 0.05;

// What this test looks at of an implementation.
struct MadeUp {
  double loss = 0.0, dropped = 0.0, kept = 0.0, coefficient = 0.0, kl_dropped = 0.0, made_up = 0.0;
  std::vector<double> grad;
};

LossSpec made_up_spec() {
  LossSpec spec;
  spec.reduction.kind = ReductionKind::sum;
  Gate gate;
  gate.quantity = Quantity::k2;  // what MadeUpRules computes in its place
  gate.keep.high = kGateHigh;
  spec.gates.push_back(gate);
  return spec;
}

// The definition, as it would stand in reference.cpp.
MadeUp in_double(const Batch& batch) {
  MadeUp out;
  for (size_t i = 0; i < batch.pi.size(); ++i) {
    out.grad.push_back(0.0);
    if (!batch.mask[i]) continue;
    const double x = batch.pi[i] - batch.rollout[i], r = std::exp(x), A = batch.advantages[i];
    if (std::abs(x) * x * x > kGateHigh) {
      out.dropped += 1.0;
      out.kl_dropped += std::expm1(x) - x;
      out.made_up += x * x;
    } else {
      out.kept += 1.0;
      out.loss -= A * std::log1p(r);
      out.grad.back() = -A * r / (1.0 + r);
      out.coefficient += r / (1.0 + r);
    }
  }
  return out;
}

MadeUp from_slots(double loss, const std::vector<float>& grad, auto slot) {
  MadeUp out{loss,
             slot(static_cast<int>(Slot::dropped)),
             slot(static_cast<int>(Slot::kept)),
             slot(static_cast<int>(Slot::coefficient)),
             slot(static_cast<int>(Slot::kl_dropped)),
             slot(kMadeUpSlot),
             {}};
  out.grad.assign(grad.begin(), grad.end());
  return out;
}

MadeUp in_scalars(const FloatBatch& batch) {
  const LossPlan plan = make_complete_plan(made_up_spec());
  float32::LossBatch streams;
  streams.streams[static_cast<int>(Stream::pi)] = batch.pi.data();
  streams.streams[static_cast<int>(Stream::rollout)] = batch.rollout.data();
  streams.advantages = batch.advantages.data();
  streams.mask = batch.mask.data();
  float32::TokenSums<float32::MadeUpRules, kSlots> sums;
  std::vector<float> grad(batch.pi.size());
  for (size_t i = 0; i < batch.pi.size(); ++i) {
    float32::SequenceState state{};
    state.scale = 1.0f;
    float32::TokenIn in;
    const int64_t at = static_cast<int64_t>(i);
    if (!float32::load_token(plan, streams, {}, at, state, in)) continue;
    const auto out = float32::evaluate_alone<float32::MadeUpRules>(plan, in);
    grad[i] = out.grad;
    sums.add(plan, streams, at, in, out);
  }
  EXPECT_FALSE(sums.not_finite);
  return from_slots(sums.loss, grad, [&](int k) { return sums.slot(k); });
}

MadeUp in_vectors(const FloatBatch& batch) {
  const LossPlan plan = make_loss_plan(made_up_spec());
  std::vector<float> grad(batch.pi.size());
  TokenInputs in;
  in.streams[static_cast<int>(Stream::pi)] = batch.pi.data();
  in.streams[static_cast<int>(Stream::rollout)] = batch.rollout.data();
  in.advantages = batch.advantages.data();
  in.mask = batch.mask.data();
  in.grad = grad.data();
  TokenTotals<kSlots> sums{};
  KernelHistogram histogram{};
  HWY_DYNAMIC_DISPATCH(run_made_up)(plan, in, batch.pi.size(), sums, &histogram);
  EXPECT_FALSE(sums.not_finite);
  return from_slots(sums.loss, grad, [&](int k) { return sums.slots[k]; });
}

// Sums of some hundred float32 numbers of size one.
void expect_equal(const MadeUp& found, const MadeUp& wanted, const std::string& who) {
  const double tolerance = 2e-4;
  EXPECT_NEAR(found.loss, wanted.loss, tolerance) << who;
  EXPECT_EQ(found.dropped, wanted.dropped) << who;
  EXPECT_EQ(found.kept, wanted.kept) << who;
  EXPECT_NEAR(found.coefficient, wanted.coefficient, tolerance) << who;
  EXPECT_NEAR(found.kl_dropped, wanted.kl_dropped, tolerance * std::max(1.0, wanted.kl_dropped))
      << who;
  EXPECT_NEAR(found.made_up, wanted.made_up, tolerance * std::max(1.0, wanted.made_up)) << who;
  ASSERT_EQ(found.grad.size(), wanted.grad.size());
  for (size_t i = 0; i < wanted.grad.size(); ++i) {
    EXPECT_NEAR(found.grad[i], wanted.grad[i], 1e-6) << who << ": position " << i;
  }
}

TEST(MadeUpFormula, IsComputedByScalarsAndByEverySimdLevel) {
  const Batch batch = testing::rounded(testing::random_batch(11, {97, 64, 1, 130}));
  const FloatBatch floats(batch);
  const MadeUp wanted = in_double(batch);
  ASSERT_GT(wanted.dropped, 10.0);
  ASSERT_GT(wanted.kept, 10.0);
  ASSERT_GT(wanted.made_up, 1.0);
  expect_equal(in_scalars(floats), wanted, "scalars");
  for (const std::string& level : simd_levels()) {
    const PinSimdLevel pin(level);
    expect_equal(in_vectors(floats), wanted, level);
  }
}

}  // namespace
}  // namespace leeway
#endif
