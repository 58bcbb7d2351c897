// A user's correction, and the built-in ones through the same interface.

#include <gtest/gtest.h>

#include "core/test_support.h"
#include "leeway/error.h"
#include "leeway/evaluator.h"

namespace leeway {
namespace {

using testing::random_batch;

// Halves every token sampled by a version older than `oldest` and drops those
// that pi makes much less likely than rollout did.
CorrectionInfo staleness() {
  return {
      "staleness",
      "a test",
      "halves old tokens, drops collapsed ones",
      {{"oldest", KeyType::number, "3", "versions below this are old", {0.0, 100.0}, false, {}}},
      [](const KeyValues& values) {
        const double oldest = values.number("oldest");
        return make_correction("staleness", "0.5 where version < oldest",
                               {Stream::pi, Stream::rollout},
                               [oldest](const auto& seq, auto effect) {
                                 for (size_t t = 0; t < seq.mask.size(); ++t) {
                                   if (!seq.mask[t]) continue;
                                   if (seq.versions[t] < oldest) effect.weights[t] *= 0.5f;
                                   if (seq.pi[t] - seq.rollout[t] < -1.0f) effect.mask[t] = 0;
                                 }
                               });
      }};
}

TEST(Corrections, AUsersFunctionWeighsAndMasksUnderItsName) {
  Catalog catalog;
  catalog.add(staleness());
  const Batch batch = random_batch(13, {20, 40, 9}, true);
  const LossSpec spec = catalog.make_spec("reinforce+staleness", {{"oldest", 4.0, ""}});
  const LossResult result = evaluate_reference(spec, batch.view());
  double tokens = 0;
  for (uint8_t m : batch.mask) tokens += m;
  for (size_t i = 0; i < batch.pi.size(); ++i) {
    double expected = 0.0;
    if (batch.mask[i] && batch.pi[i] - batch.rollout[i] >= -1.0) {
      expected = -(batch.versions[i] < 4 ? 0.5 : 1.0) * batch.advantages[i] / tokens;
    }
    EXPECT_NEAR(result.grad[i], expected, 1e-12);  // dropped tokens stay in the denominator
  }
  const FloatBatch floats(batch);
  std::vector<float> grad(batch.pi.size());
  Evaluator evaluator(2);
  evaluator.evaluate(spec, floats.view(), grad);
  for (size_t i = 0; i < grad.size(); ++i) EXPECT_NEAR(grad[i], result.grad[i], 1e-6);
}

TEST(Corrections, ComposeWithTheBuiltInOnes) {
  Catalog catalog;
  catalog.add(staleness());
  const Batch batch = random_batch(13, {20, 40, 9}, true);
  const auto both = evaluate_reference(catalog.make_spec("ppo+tis+staleness", {}), batch.view());
  const auto tis = evaluate_reference(catalog.make_spec("ppo+tis", {}), batch.view());
  for (size_t i = 0; i < both.grad.size(); ++i) {
    if (both.grad[i] == 0.0) continue;
    EXPECT_NEAR(both.grad[i], tis.grad[i] * (batch.versions[i] < 3 ? 0.5 : 1.0), 1e-12);
  }
}

TEST(Corrections, ATakenNameOrKeyIsRefused) {
  Catalog catalog;
  catalog.add(staleness());
  EXPECT_THROW(catalog.add(staleness()), Error);
  CorrectionInfo clash = staleness();
  clash.name = "icepop";
  EXPECT_THROW(catalog.add(clash), Error);
  clash.name = "fresh";
  clash.keys[0].name = "tis_cap";
  EXPECT_THROW(catalog.add(clash), Error);
  clash.keys[0].name = "reduction";
  EXPECT_THROW(catalog.add(clash), Error);
}

TEST(Corrections, AMaskedTokenLosesItsPenaltyToo) {
  Catalog catalog;
  catalog.add(staleness());
  Batch batch;
  batch.offsets = {0, 1};
  batch.pi = {-4.0};
  batch.rollout = {-1.0};
  batch.prox = {-2.0};
  batch.advantages = {1.0};
  batch.versions = {9};
  EXPECT_EQ(evaluate_reference(catalog.make_spec("dro+staleness", {}), batch.view()).loss, 0.0);
}

// off_policy_is on a REINFORCE base is CISPO: the value is -w A log pi, the gradient -w A, and
// nothing flows through w. In both bound conventions.
TEST(Corrections, OffPolicyIsOnReinforceIsCispo) {
  const Catalog catalog;
  const Batch batch = random_batch(23, {30, 12, 50}, true);
  struct Convention {
    Settings hook, cispo;
    double low, high;
  };
  const std::vector<Convention> conventions = {
      {{{"ois_ratio_low", 0.0, ""}, {"ois_ratio_high", 2.0, ""}},
       {{"ratio_low", 0.0, ""}, {"ratio_high", 2.0, ""}},
       0.0,
       2.0},
      {{{"ois_eps_low", 0.2, ""}, {"ois_eps_high", 0.28, ""}},
       {{"eps_low", 0.2, ""}, {"eps_high", 0.28, ""}},
       0.8,
       1.28},
      {{{"ois_eps_low", 1.0, ""}, {"ois_eps_high", 4.0, ""}},  // one-sided
       {{"eps_low", 1.0, ""}, {"eps_high", 4.0, ""}},
       0.0,
       5.0}};
  for (const Convention& c : conventions) {
    const auto hook = evaluate_reference(catalog.make_spec("off_policy_is", c.hook), batch.view());
    const auto cispo = evaluate_reference(catalog.make_spec("cispo", c.cispo), batch.view());
    double value = 0.0, tokens = 0.0;
    for (uint8_t m : batch.mask) tokens += m;
    for (size_t i = 0; i < batch.pi.size(); ++i) {
      EXPECT_NEAR(hook.grad[i], cispo.grad[i], 1e-15);
      if (!batch.mask[i]) continue;
      const double w = std::clamp(std::exp(batch.pi[i] - batch.rollout[i]), c.low, c.high);
      EXPECT_NEAR(hook.grad[i], -w * batch.advantages[i] / tokens, 1e-9);
      value += -w * batch.advantages[i] * batch.pi[i] / tokens;
    }
    EXPECT_NEAR(hook.loss, cispo.loss, 1e-15);
    EXPECT_NEAR(hook.loss, value, 1e-7);
  }
}

// slime's own example: ratios [2, 0.5, 1] with bounds [0.8, 2] weigh [2, 0.8, 1].
TEST(Corrections, OffPolicyIsWeighsTheTextbookTokens) {
  const Catalog catalog;
  Batch batch;
  batch.offsets = {0, 3};
  const double ln2 = static_cast<double>(std::log(2.0f));
  batch.rollout = {-3.0, -3.0, -3.0};
  batch.pi = {-3.0 + ln2, -3.0 - ln2, -3.0};
  batch.advantages = {1.0, 1.0, 1.0};
  const auto result = evaluate_reference(
      catalog.make_spec("off_policy_is",
                        {{"ois_ratio_low", 0.8, ""}, {"reduction", std::string("sum"), ""}}),
      batch.view(), {}, nullptr, true);
  EXPECT_NEAR(result.grad[0], -2.0, 1e-6);
  EXPECT_DOUBLE_EQ(result.grad[1], -0.8);
  EXPECT_DOUBLE_EQ(result.grad[2], -1.0);
}

TEST(Corrections, GeometricAndSequenceWeightsUseTheTrainedTokensAlone) {
  const Catalog catalog;
  Batch batch;
  batch.offsets = {0, 3};
  batch.pi = batch.prox = {-1.0, -1.0, -1.0};
  batch.rollout = {-1.2, -5.0, -1.4};
  batch.advantages = {1.0, 1.0, 1.0};
  batch.mask = {1, 0, 1};
  auto grad = [&](const char* level) {
    return evaluate_reference(
               catalog.make_spec("reinforce+tis", {{"tis_level", std::string(level), ""},
                                                   {"reduction", std::string("sum"), ""}}),
               batch.view())
        .grad;
  };
  EXPECT_NEAR(grad("geometric")[0], -std::exp(0.3), 1e-12);
  EXPECT_NEAR(grad("sequence")[2], -std::exp(0.6), 1e-12);
  EXPECT_NEAR(grad("token")[2], -std::exp(0.4), 1e-12);
}

}  // namespace
}  // namespace leeway
