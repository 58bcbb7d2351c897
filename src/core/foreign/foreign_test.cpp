// Keys of foreign presets as their sources' configurations have them: defaults, what acts, what is
// refused. conformance_test.cpp compares formulas with goldens.

#include "core/foreign/foreign.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <tuple>

#include "core/test_support.h"
#include "leeway/error.h"
#include "leeway/metrics.h"

namespace leeway {
namespace {

using testing::with;
using KeyValues = std::vector<std::pair<std::string, Value>>;

Catalog catalog;

LossSpec spec_of(const std::string& preset, const KeyValues& settings = {}) {
  return catalog.make_spec(preset, with(preset, settings).settings);
}

// One sequence of tokens with these ratios pi/prox and prox = rollout.
Batch batch_of(const std::vector<double>& ratios, double advantage) {
  Batch batch;
  for (const double ratio : ratios) {
    batch.pi.push_back(-30.0 + std::log(ratio));
    for (auto* stream : {&batch.prox, &batch.rollout, &batch.ref}) stream->push_back(-30.0);
    batch.advantages.push_back(advantage);
  }
  batch.offsets.push_back(static_cast<int64_t>(ratios.size()));
  return batch;
}

double loss_of(const std::string& preset, const KeyValues& settings, const Batch& batch) {
  return evaluate_reference(spec_of(preset, settings), batch.view()).loss;
}

TEST(ForeignKeys, DualClipOfCookbooksDapoIsOffUntilItIsAskedFor) {
  const Batch batch = batch_of({5.0}, -1.0);
  for (const char* preset : {"cookbook_PR169/dapo", "cookbook/dapo"}) {
    EXPECT_NEAR(loss_of(preset, {}, batch), 5.0, 1e-6) << preset;
    EXPECT_NEAR(loss_of(preset, {{"eps_clip_c", 3.0}}, batch), 3.0, 1e-6) << preset;
    EXPECT_NEAR(loss_of(preset, {{"eps_clip_c", std::string("off")}}, batch), 5.0, 1e-6) << preset;
  }
}

TEST(ForeignKeys, OfTheSourceAct) {
  struct Case {
    const char* preset;
    KeyValues settings;
    std::vector<double> ratios;
    double advantage, without, with;
  };
  const double e2 = std::exp(2.0), e3 = std::exp(3.0);
  for (const Case& c : std::vector<Case>{
           {"cookbook_PR169/gspo", {{"clip_ratio", 0.5}}, {1.4}, 1.0, -1.2, -1.4},
           {"cookbook_PR169/gspo",
            {{"clip_ratio", 0.5}, {"clip_ratio_high", 0.3}},
            {1.4},
            1.0,
            -1.2,
            -1.3},
           {"cookbook_PR169/gspo", {{"seq_ratio_log_cap", 2.0}}, {e3}, -1.0, e3, e2},
           {"cookbook/gspo", {{"seq_ratio_log_cap", 2.0}}, {e3}, -1.0, e3, e2},
           {"cookbook_PR169/dapo", {{"ratio_log_cap", 2.0}}, {e3}, -1.0, e3, e2},
           {"cookbook_PR169/cispo", {{"ratio_log_cap", 2.0}}, {e3}, -1.0, e3, e2},
           {"cookbook/dapo", {{"ratio_log_cap", 2.0}}, {e3}, -1.0, e3, e2},
           {"cookbook/is", {{"ratio_log_cap", 2.0}}, {e3}, -1.0, e3, e2},
       }) {
    const LossSpec spec = spec_of(c.preset, c.settings);
    const Batch batch = batch_of(c.ratios, c.advantage);
    EXPECT_TRUE(spec.inert.empty()) << c.preset << ": " << spec.inert.front();
    EXPECT_NEAR(loss_of(c.preset, {}, batch), c.without, 1e-5) << c.preset;
    EXPECT_NEAR(evaluate_reference(spec, batch.view()).loss, c.with, 1e-5) << c.preset;
  }
  // The sources' own spellings of what the goldens shorten.
  for (const auto& [preset, key, value] : std::vector<std::tuple<const char*, const char*, Value>>{
           {"verl/vanilla", "loss_agg_mode", std::string("seq-mean-token-sum")},
           {"verl/vanilla+IS", "rollout_is", std::string("token")},
           {"verl/vanilla+IS", "rollout_is_threshold", 1.5},
           {"verl/vanilla+IS", "rollout_is_batch_normalize", true},
           {"verl/vanilla+RS", "rollout_rs", std::string("seq_mean_k3")},
           {"verl/vanilla+RS", "rollout_rs_threshold", std::string("0.5_1.5")},
           {"areal/sapo", "sapo_tau_neg", 2.0},
           {"areal/sapo", "importance_sampling_level", std::string("sequence")},
           {"slime/ppo", "calculate_per_token_loss", true},
           {"slime/ppo", "use_rollout_logprobs", true}}) {
    EXPECT_TRUE(spec_of(preset, {{key, value}}).inert.empty()) << preset << " " << key;
  }
  EXPECT_EQ(spec_of("slime/ppo", {{"calculate_per_token_loss", true}}).reduction.kind,
            ReductionKind::token_mean);
  EXPECT_FALSE(spec_of("slime/ppo", {{"use_rollout_logprobs", true}}).reads(Stream::prox));
  EXPECT_THROW(spec_of("areal/sapo", {{"sapo_tau_pos", 2.0}, {"tau_pos", 2.0}}), Error);
  // Main has no symmetric fallback, and PR 169's GSPO does nothing with its kl_beta.
  EXPECT_EQ(spec_of("cookbook/gspo", {{"clip_ratio", 0.5}}).inert,
            std::vector<std::string>{"clip_ratio"});
  EXPECT_EQ(spec_of("cookbook_PR169/gspo", {{"kl_beta", 0.5}}).inert,
            std::vector<std::string>{"kl_beta"});
}

TEST(ForeignKeys, ThatTheSourceRefusesAreRefused) {
  struct Case {
    const char *preset, *key;
    Value value;
  };
  for (const Case& c : std::vector<Case>{
           {"cookbook_PR169/dapo", "eps_clip_c", 1.0},
           {"cookbook/dapo", "eps_clip_c", 0.5},
           {"cookbook/dapo", "ratio_log_cap", -1.0},
           {"cookbook/dapo", "eps_clip", -0.1},
           {"cookbook/grpo", "icepop_threshold", 0.99},
           {"cookbook/grpo", "cap", -1.0},
           {"cookbook/grpo", "kl_beta", -1.0},
           {"cookbook/grpo", "eps_clip_high", -0.1},
           {"cookbook/grpo", "level", std::string("geometric")},
           {"cookbook/gspo", "seq_ratio_log_cap", -1.0},
           {"cookbook/dro", "beta", -1.0},
           {"prime/PR2401_icepop", "icepop_ratio_low", -0.1},
           {"prime/PR2401_icepop", "icepop_ratio_high", -1.0},
           {"prime/PR2401_icepop", "teacher_tau", -1.0},
           {"prime/PR2401_first_rollout_min", "icepop_rollout_min_ratio", -1e-5},
           {"prime/PR2423_ipo_kl_kept", "dppo_mask_low", -1.0},
           {"prime/PR2423_ipo_kl_kept", "kl_tau", -1.0},
           {"prime/PR2434_dppo_tv_sym", "dppo_diff_high", -1.0},
           {"prime/default_dppo_kl", "dppo_mask_low", -0.2},
           {"prime/ipo", "ipo_threshold", -0.1},
           {"slime/ppo", "eps_clip_c", 1.0},
           {"verl/vanilla", "clip_ratio_c", 1.0},
           {"areal/ppo", "c_clip", 1.0},
           {"areal/cispo", "eps_clip_higher", 0.0},
           {"areal/sapo", "tau_pos", 0.0},
           {"areal/sapo", "level", std::string("turn")},
           {"areal/ppo+RS", "upper", 1.0},
           {"areal/ppo+RS", "lower", 0.0},
           {"areal/ppo+RS", "lower", 6.0},
           {"areal/ppo+RS", "action", std::string("drop")},
       }) {
    try {
      spec_of(c.preset, {{c.key, c.value}});
      ADD_FAILURE() << c.preset << " took " << c.key << " = " << value_text(c.value);
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(c.key), std::string::npos) << error.what();
    }
  }
  EXPECT_NO_THROW(spec_of("cookbook/grpo", {{"icepop_threshold", 1.0}}));
  EXPECT_NO_THROW(spec_of("prime/PR2401_icepop", {{"icepop_ratio_low", 0.0}}));
  EXPECT_NO_THROW(spec_of("areal/ppo+RS", {{"metric", std::string("kl_k1")}, {"upper", -0.1}}));
  EXPECT_THROW(spec_of("areal/ppo+RS", {{"metric", std::string("kl_k2")}, {"upper", 0.0}}), Error);
  EXPECT_THROW(
      spec_of("areal/ppo+RS", {{"metric", std::string("kl_k3")}, {"action", std::string("clamp")}}),
      Error);
}

TEST(ForeignKeys, ABandUpsideDownIsSaidAndDoesWhatTheSourceDoes) {
  const Batch batch = batch_of({0.3, 1.0, 3.0}, 1.0);
  const LossSpec gate =
      spec_of("prime/PR2401_icepop", {{"icepop_ratio_low", 5.0}, {"icepop_ratio_high", 0.2}});
  ASSERT_EQ(gate.warnings.size(), 1u);
  EXPECT_NE(gate.warnings[0].find("from 5 to 0.2"), std::string::npos) << gate.warnings[0];
  EXPECT_NE(gate.warnings[0].find("every token is dropped"), std::string::npos);
  EXPECT_EQ(evaluate_reference(gate, batch.view()).loss, 0.0);

  const LossSpec weight =
      spec_of("slime/ppo+vanilla_tis", {{"tis_clip_low", 2.0}, {"tis_clip", 0.5}});
  ASSERT_EQ(weight.warnings.size(), 1u);
  // torch.clamp(x, 2, 0.5) is 0.5 for every x, and so is ours: mean of 0.5 min(r, clip(r)).
  EXPECT_NEAR(evaluate_reference(weight, batch.view()).loss, -0.5 * (0.3 + 1.0 + 1.2) / 3.0, 1e-6);

  for (const auto& [preset, low, high] :
       std::vector<std::tuple<const char*, const char*, const char*>>{
           {"slime/ppo+icepop", "tis_clip_low", "tis_clip"},
           {"slime/ppo+mis", "rs_lower_bound", "rs_upper_bound"},
           {"tinker/ppo", "clip_low_threshold", "clip_high_threshold"}}) {
    EXPECT_EQ(spec_of(preset, {{low, 3.0}, {high, 0.5}}).warnings.size(), 1u) << preset;
    EXPECT_TRUE(spec_of(preset).warnings.empty()) << preset;
  }
}

// The numbers of AReaL's sapo_loss_fn: ratio and advantage are means over the sequence, and the
// mean's sign chooses the temperature.
TEST(ForeignKeys, SapoAtSequenceLevelGoesByTheMeanAdvantage) {
  Batch batch;
  batch.pi = {-0.5, -1.2, -0.3, -0.7, -2.0};
  batch.prox = {-0.9, -1.0, -0.6, -0.4, -2.5};
  batch.advantages = {2.0, -1.0, 0.5, 1.0, -3.0};
  batch.offsets = {0, 3, 5};
  const LossResult result =
      evaluate_reference(spec_of("areal/sapo", {{"level", std::string("sequence")}}), batch.view());
  EXPECT_NEAR(result.loss, 0.14967094849807933, 1e-9);
  for (size_t t = 0; t < 5; ++t) {
    EXPECT_NEAR(result.grad[t], t < 3 ? -0.11716992100792045 : 0.22036169129549416, 1e-9) << t;
  }
}

}  // namespace
}  // namespace leeway
