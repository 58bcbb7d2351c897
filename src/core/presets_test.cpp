// Names to specs: strictness, composition, and agreement of native presets with their sources.

#include "leeway/presets.h"

#include <gtest/gtest.h>

#include "base/files.h"
#include "core/test_support.h"
#include "leeway/error.h"

namespace leeway {
namespace {

using testing::random_batch;
using testing::with;

Catalog catalog;

struct Refusal {
  testing::NamedPreset preset;
  std::vector<std::string> says;
};

TEST(Presets, RefuseWhatHasNoEffectOrNoMeaning) {
  const std::vector<Refusal> refusals = {
      {with("icepop", {{"icepop_ratio_lo", 0.1}}),
       {"icepop_ratio_lo = 0.1", "did you mean icepop_ratio_low?"}},
      {with("icepop", {{"eps_low", 0.1}}), {"belongs to ppo, grpo"}},
      {with("icepop", {{"dppo_mask_low", 0.2}}),
       {"changed its meaning", "dppo_diff_low", "ipo_ratio_low"}},
      {with("icepop", {{"kl_tau", 0.2}}), {"ipo_kl pays it on kept tokens only"}},
      {with("dppo_tv", {{"kl_tau", 0.2}}), {"dppo_kl on every trained token"}},
      {with("ppo", {{"eps_clip", 0.2}}), {"eps_low and eps_high", "not tis_clip"}},
      {with("ppo+tis", {{"tis_clip", 2.0}}), {"tis_cap", "not eps_clip"}},
      {with("icepop", {{"icepop_ratio_low", std::string("x")}}), {"must be a number"}},
      {with("icepop", {{"icepop_ratio_low", true}}), {"must be a number"}},
      {with("icepop", {{"icepop_ratio_low", std::nan("")}}), {"icepop_ratio_low"}},
      {with("icepop", {{"icepop_ratio_low", -1.0}}), {"at least 0"}},
      {with("icepop", {{"icepop_ratio_low", 6.0}}), {"must not exceed icepop_ratio_high"}},
      {with("icepop", {{"icepop_ratio_low", 0.0}, {"icepop_ratio_high", kInfinity}}), {"inert"}},
      {with("icepop", {{"icepop_rollout_min_ratio", 0.0}}), {"above 0"}},
      {with("icepop", {{"fixed_length", 10.0}}), {"inert", "reduction"}},
      {with("icepop", {{"reduction", std::string("fixed_length")}}), {"needs fixed_length"}},
      {with("icepop", {{"reduction", std::string("mean")}}), {"one of token_mean"}},
      {with("icepop", {{"reduction", 3.0}}), {"must be text"}},
      {with("icepop", {{"adv_tau", 0.0}}), {"no policy term"}},
      {with("is", {{"denominator", std::string("kept")}}), {"inert"}},
      {with("icepop", {{"denominator", std::string("kept")}, {"reduction", std::string("sum")}}),
       {"inert"}},
      {with("ppo", {{"dual_clip", 1.0}}), {"above 1"}},
      {with("ppo", {{"anchor", std::string("ref")}}), {"one of prox, rollout"}},
      {with("cispo_mask", {{"anchor", std::string("rollout")}}), {"one of prox"}},
      {with("cispo", {{"eps_low", 0.2}}), {"give both"}},
      {with("cispo", {{"eps_low", 0.2}, {"eps_high", 0.2}, {"ratio_low", 0.1}}),
       {"cannot be mixed"}},
      {with("off_policy_is", {{"ois_eps_high", 0.2}, {"ois_ratio_high", 2.0}}),
       {"cannot be mixed"}},
      {with("icepopp"), {"no preset icepopp", "icepop"}},
      {with("tis"), {"is a correction", "ppo+tis"}},
      {with("ppo+tiss"), {"no correction tiss", "did you mean tis?"}},
      {with("ppo+tis+tis"), {"twice"}},
      {with("ppo+tis+icepop_tis+off_policy_is"), {"at most two"}},
      {with("ppo+"), {"no correction"}},
      {with(""), {"no preset"}},
      {with("verl/vanila"), {"did you mean verl/vanilla?"}},
      {with("nobody/grpo"), {"not known"}},
      {with("slime/ppo", {{"reducer", std::string("mean")}}), {"sample_mean or token_mean"}},
      {with("verl/vanilla+IS", {{"threshold", std::string("a_b")}}), {"LOW_HIGH"}},
  };
  for (const Refusal& refusal : refusals) {
    try {
      catalog.make_spec(refusal.preset.preset, refusal.preset.settings);
      ADD_FAILURE() << "accepted: " << refusal.preset.label();
    } catch (const Error& error) {
      for (const std::string& words : refusal.says) {
        EXPECT_NE(std::string(error.what()).find(words), std::string::npos)
            << refusal.preset.label() << " says: " << error.what() << "\n  without: " << words;
      }
    }
  }
}

TEST(Presets, AcceptWhatTheContractNames) {
  EXPECT_NO_THROW(
      catalog.make_spec("icepop", {{"icepop_rollout_min_ratio", std::string("off"), ""}}));
  EXPECT_NO_THROW(catalog.make_spec("gspo", {{"log_cap", 5.0, ""}}));
  EXPECT_EQ(catalog.make_spec("off_policy_is", {}).corrections.size(), 1u);
  const LossSpec spec = catalog.make_spec("grpo+tis+icepop_tis", {});
  EXPECT_EQ(spec.corrections.size(), 2u);
  for (const testing::NamedPreset& preset : testing::native_list(catalog)) {
    EXPECT_NO_THROW(catalog.make_spec(preset.preset, preset.settings)) << preset.label();
  }
}

TEST(Presets, TheLastSettingOfAKeyCounts) {
  const LossSpec spec = catalog.make_spec(
      "icepop", {{"icepop_ratio_high", 3.0, "file "}, {"icepop_ratio_high", 4.0, "--set "}});
  EXPECT_EQ(spec.gates.front().keep.high, 4.0);
}

TEST(Presets, ForeignPresetsListWhatIsInert) {
  const LossSpec spec = catalog.make_spec("slime/reinforce+off_policy_is_PR2084",
                                          {{"eps_clip", 0.2, ""}, {"made_up", 1.0, ""}});
  EXPECT_EQ(spec.inert, (std::vector<std::string>{"eps_clip", "made_up"}));
  EXPECT_TRUE(catalog.make_spec("slime/ppo", {{"eps_clip", 0.2, ""}}).inert.empty());
}

// Adding an option fails here until the list is changed deliberately.
TEST(Presets, TheListOfKeysIsTheArguedOne) {
  std::string keys;
  auto add = [&](const std::string& owner, std::span<const KeyInfo> infos) {
    for (const KeyInfo& key : infos)
      keys += owner + " " + key.name + " " + key.default_value + "\n";
  };
  add("everywhere", Catalog::common_keys());
  for (const PresetInfo& p : catalog.presets()) add(p.name, p.keys);
  for (const CorrectionInfo& c : catalog.corrections()) add("+" + c.name, c.keys);
  EXPECT_EQ(keys, read_file(LEEWAY_SOURCE_DIR "/tests/data/loss_keys.txt"));
}

struct Equal {
  testing::NamedPreset native, foreign;
};

// Each seed's native preset is its reference, where masks are respected.
TEST(Presets, NativePresetsEqualTheirSources) {
  const std::string mean = "seq_mean_token_mean", sum = "sum";
  const std::vector<Equal> pairs = {
      {with("icepop"), with("prime/PR2401_icepop")},
      {with("icepop", {{"icepop_ratio_low", 0.5}, {"icepop_rollout_min_ratio", 0.15}}),
       with("prime/PR2401_first_rollout_min", {{"icepop_rollout_min_ratio", 0.15}})},
      {with("ipo_kl"), with("prime/PR2423_ipo_kl_kept")},
      {with("dppo_tv", {{"adv_tau", 0.5}, {"teacher_tau", 0.3}}),
       with("prime/PR2434_teacher", {{"adv_tau", 0.5}, {"teacher_tau", 0.3}})},
      {with("dppo_kl"), with("prime/default_dppo_kl")},
      {with("off_policy_is", {{"reduction", mean}}), with("slime/reinforce+off_policy_is_PR2084")},
      {with("ppo+off_policy_is", {{"reduction", mean}}), with("slime/ppo+off_policy_is_PR2084")},
      {with("ppo+icepop_tis", {{"reduction", mean}}),
       with("slime/ppo+icepop", {{"tis_clip_low", 0.5}})},
      {with("grpo+tis", {{"ref_kl", 1e-3}, {"reduction", sum}}), with("cookbook/grpo")},
      {with("dapo+tis", {{"tis_level", std::string("geometric")}, {"reduction", sum}}),
       with("cookbook/dapo", {{"level", std::string("sequence")}})},
      {with("ppo", {{"dual_clip", 3.0}}), with("verl/vanilla")},
      {with("gspo", {{"reduction", mean}}), with("verl/gspo")},
      {with("sapo", {{"reduction", mean}}), with("verl/sapo")},
      {with("dro"), with("verl/dro")},
      {with("m2po", {{"denominator", std::string("kept")}}), with("areal/m2po+ppo")},
      {with("cispo", {{"ratio_high", 4.0}, {"reduction", sum}}), with("tinker/cispo")},
  };
  for (const Equal& pair : pairs) {
    Batch batch = random_batch(17, {12, 7, 9, 30}, true);
    const auto native = evaluate_reference(
        catalog.make_spec(pair.native.preset, pair.native.settings), batch.view());
    const auto foreign = evaluate_reference(
        catalog.make_spec(pair.foreign.preset, pair.foreign.settings), batch.view());
    EXPECT_NEAR(native.loss, foreign.loss, 1e-12) << pair.native.label();
    for (size_t i = 0; i < native.grad.size(); ++i) {
      EXPECT_NEAR(native.grad[i], foreign.grad[i], 1e-12) << pair.native.label() << " token " << i;
    }
  }
}

// cookbook PR 169 looks at masked positions; without any it is grpo, dapo, gspo and cispo_mask with
// tis.
TEST(Presets, CookbookPr169IsTheNativePresetWhereNothingIsMasked) {
  for (const char* level : {"token", "sequence"}) {
    const std::string native_level = std::string(level) == "token" ? "token" : "geometric";
    for (const char* loss : {"dapo", "gspo", "cispo"}) {
      Batch batch = random_batch(19, {12, 7, 9}, true);
      batch.mask.assign(batch.mask.size(), 1);
      const std::string base = std::string(loss) == "cispo" ? "cispo_mask" : loss;
      const Settings settings{{"tis_level", native_level, ""},
                              {"reduction", std::string("sum"), ""}};
      const auto native =
          evaluate_reference(catalog.make_spec(base + "+tis", settings), batch.view());
      const auto foreign =
          evaluate_reference(catalog.make_spec(std::string("cookbook_PR169/") + loss,
                                               {{"tis_level", std::string(level), ""}}),
                             batch.view());
      EXPECT_NEAR(native.loss, foreign.loss, 1e-12) << base << " " << level;
      for (size_t i = 0; i < native.grad.size(); ++i) {
        EXPECT_NEAR(native.grad[i], foreign.grad[i], 1e-12) << base << " " << level;
      }
    }
  }
}

TEST(Presets, NearestNameFindsTyposAndNothingElse) {
  EXPECT_EQ(nearest_name("icpop", {"icepop", "dapo"}), "icepop");
  EXPECT_EQ(nearest_name("completely_else", {"icepop", "dapo"}), "");
}

}  // namespace
}  // namespace leeway
