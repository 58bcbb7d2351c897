// Invalid configurations: each is refused with exit code 2 and a message that contains the file,
// the line, the key, its value and the remedy; the same mistakes on the command line name the
// option.

#include <gtest/gtest.h>

#include "cli_helpers.h"

namespace leeway {
namespace {

struct Row {
  std::string name;
  std::string table;  // contents of [trainer.loss], which is line 1
  int line;
  std::string key, value;
  std::vector<std::string> remedy;
};

// Names only: brackets in gtest's test list would confuse CMake, which parses it.
void PrintTo(const Row& row, std::ostream* stream) { *stream << row.name; }
std::string row_name(const testing::TestParamInfo<Row>& info) { return info.param.name; }

class BadLossTable : public testing::TestWithParam<Row> {};

TEST_P(BadLossTable, IsRefusedWithFileLineKeyValueAndRemedy) {
  const Row& row = GetParam();
  const TempFolder folder;
  const std::string file = folder.write("run.toml", "[trainer.loss]\n" + row.table + "\n");
  const std::string batch = folder.write("batch.json", kBatch);
  std::vector<std::string> words = {file, "line " + std::to_string(row.line), row.key, row.value};
  words.insert(words.end(), row.remedy.begin(), row.remedy.end());
  expect_mistake(run_program({"config", file}), words);
  expect_mistake(run_program({"loss", "eval", "--config", file, "--batch", batch}), words);
}

std::vector<Row> unknown_keys() {
  return {
      {"ASlipOfTheFinger",
       "preset = \"icepop\"\nicepop_ratio_hihg = 4",
       3,
       "icepop_ratio_hihg",
       "4",
       {"did you mean icepop_ratio_high?"}},
      {"NothingLikeIt",
       "preset = \"icepop\"\n\nfrobnicate = 0.75",
       4,
       "frobnicate",
       "0.75",
       {"icepop_ratio_low", "icepop_ratio_high", "reduction"}},
      {"AsADottedKey", "preset = \"icepop\"\nicepop.ratio_high = 4", 3, "icepop", "", {}},
      {"AnotherPresetsKey",
       "preset = \"icepop\"\neps_low = 0.3",
       3,
       "eps_low",
       "0.3",
       {"belongs to", "ppo", "grpo"}},
      {"ACorrectionsKey",
       "preset = \"grpo\"\ntis_cap = 3",
       3,
       "tis_cap",
       "3",
       {"belongs to", "+tis"}},
      {"AnotherCorrectionsKey",
       "tis_level = \"sequence\"\npreset = \"ppo+icepop_tis\"",
       2,
       "tis_level",
       "sequence",
       {"belongs to", "+tis"}},
      {"ABandOfAnotherPreset",
       "preset = \"geo_mask\"\nicepop_ratio_low = 0.5",
       3,
       "icepop_ratio_low",
       "0.5",
       {"belongs to", "icepop"}},
      {"AKeyOfReinforce",
       "preset = \"reinforce\"\ndual_clip = 3",
       3,
       "dual_clip",
       "3",
       {"belongs to", "ppo"}},
  };
}
INSTANTIATE_TEST_SUITE_P(UnknownKeys, BadLossTable, testing::ValuesIn(unknown_keys()), row_name);

std::vector<Row> wrong_types() {
  return {
      {"TextForANumber",
       "preset = \"ppo\"\neps_low = \"wide\"",
       3,
       "eps_low",
       "wide",
       {"must be a number"}},
      {"ABooleanForANumber",
       "preset = \"ppo\"\neps_low = true",
       3,
       "eps_low",
       "true",
       {"must be a number"}},
      {"OffWhereThereIsNoOff",
       "preset = \"ppo\"\neps_low = \"off\"",
       3,
       "eps_low",
       "off",
       {"must be a number"}},
      {"TextForANumberOrOff",
       "preset = \"ppo\"\ndual_clip = \"on\"",
       3,
       "dual_clip",
       "on",
       {"number or \"off\""}},
      {"ANumberForAChoice", "preset = \"ppo\"\nanchor = 3", 3, "anchor", "3", {"prox", "rollout"}},
      {"NoneOfTheChoices",
       "preset = \"ppo\"\nanchor = \"ref\"",
       3,
       "anchor",
       "ref",
       {"prox", "rollout"}},
      {"AChoiceOfAnotherPreset",
       "preset = \"cispo_mask\"\nanchor = \"rollout\"",
       3,
       "anchor",
       "rollout",
       {"prox"}},
      {"ABadReduction",
       "preset = \"ppo\"\nreduction = \"mean\"",
       3,
       "reduction",
       "mean",
       {"token_mean", "seq_mean_token_mean", "sum"}},
      {"AList", "preset = \"ppo\"\neps_low = [0.1, 0.2]", 3, "eps_low", "list", {}},
      {"ATable", "preset = \"ppo\"\neps_low = {a = 1}", 3, "eps_low", "table", {}},
      {"ADate", "preset = \"ppo\"\neps_low = 2024-01-01", 3, "eps_low", "date", {}},
      {"APresetThatIsANumber", "\npreset = 3", 3, "preset", "3", {"must be text"}},
  };
}
INSTANTIATE_TEST_SUITE_P(WrongTypes, BadLossTable, testing::ValuesIn(wrong_types()), row_name);

std::vector<Row> out_of_range() {
  return {
      {"EpsLowAboveOne", "preset = \"ppo\"\neps_low = 1.5", 3, "eps_low", "1.5", {"at most 1"}},
      {"EpsLowBelowZero", "preset = \"ppo\"\neps_low = -0.1", 3, "eps_low", "-0.1", {"at least 0"}},
      {"EpsHighBelowZero",
       "preset = \"ppo\"\neps_high = -0.1",
       3,
       "eps_high",
       "-0.1",
       {"at least 0"}},
      {"DualClipOfOne", "preset = \"ppo\"\ndual_clip = 1", 3, "dual_clip", "1", {"above 1"}},
      {"ARatioBelowZero",
       "preset = \"icepop\"\nicepop_ratio_low = -1",
       3,
       "icepop_ratio_low",
       "-1",
       {"at least 0"}},
      {"ACapOfZero", "preset = \"grpo+tis\"\ntis_cap = 0", 3, "tis_cap", "0", {"above 0"}},
      {"ADifferenceAboveOne",
       "preset = \"dppo_tv\"\ndppo_diff_low = 1.25",
       3,
       "dppo_diff_low",
       "1.25",
       {"at most 1"}},
      {"NotANumber", "preset = \"ppo\"\neps_high = nan", 3, "eps_high", "nan", {"must be"}},
      {"ANegativePenalty", "preset = \"grpo\"\nref_kl = -0.1", 3, "ref_kl", "-0.1", {"at least 0"}},
  };
}
INSTANTIATE_TEST_SUITE_P(OutOfRange, BadLossTable, testing::ValuesIn(out_of_range()), row_name);

std::vector<Row> contradictions() {
  return {
      {"LowAboveHigh",
       "preset = \"icepop\"\nicepop_ratio_low = 3\nicepop_ratio_high = 2",
       3,
       "icepop_ratio_low",
       "3",
       {"must not exceed icepop_ratio_high"}},
      {"LowAboveTheDefaultHigh",
       "preset = \"icepop\"\nicepop_ratio_low = 6",
       3,
       "icepop_ratio_low",
       "6",
       {"must not exceed icepop_ratio_high"}},
      {"HighBelowTheDefaultLow",
       "preset = \"ipo_kl\"\nipo_ratio_high = 0.1",
       3,
       "ipo_ratio_high",
       "0.1",
       {"ipo_ratio_low must not exceed ipo_ratio_high"}},
      {"AGeometricBand",
       "preset = \"geo_mask\"\ngeo_ratio_low = 1.5",
       3,
       "geo_ratio_low",
       "1.5",
       {"must not exceed geo_ratio_high"}},
      {"ABandOfWeights",
       "preset = \"ppo+icepop_tis\"\ntis_ratio_low = 2.5",
       3,
       "tis_ratio_low",
       "2.5",
       {"must not exceed tis_ratio_high"}},
      {"TwoConventionsAtOnce",
       "preset = \"cispo\"\nratio_high = 4\neps_low = 0.2\neps_high = 0.3",
       3,
       "ratio_high",
       "4",
       {"mixed", "eps_low"}},
      {"TwoConventionsOfAWeight",
       "preset = \"grpo+off_policy_is\"\nois_eps_low = 0.2\nois_eps_high = 0.3\nois_ratio_low = "
       "0.1",
       5,
       "ois_ratio_low",
       "0.1",
       {"mixed", "ois_eps_low"}},
      {"HalfOfAPair",
       "preset = \"cispo\"\neps_high = 0.3",
       3,
       "eps_high",
       "0.3",
       {"eps_low", "give both"}},
      {"AFixedLengthWithoutALength",
       "preset = \"ppo\"\nreduction = \"fixed_length\"",
       3,
       "reduction",
       "fixed_length",
       {"needs fixed_length"}},
  };
}
INSTANTIATE_TEST_SUITE_P(Contradictions, BadLossTable, testing::ValuesIn(contradictions()),
                         row_name);

std::vector<Row> inert() {
  return {
      {"ALengthWithoutFixedLength",
       "preset = \"ppo\"\nfixed_length = 100",
       3,
       "fixed_length",
       "100",
       {"inert", "reduction"}},
      {"AKeptDenominatorOfASum",
       "preset = \"icepop\"\nreduction = \"sum\"\ndenominator = \"kept\"",
       4,
       "denominator",
       "kept",
       {"inert", "sum"}},
      {"AKeptDenominatorWhereNothingIsDropped",
       "preset = \"reinforce\"\ndenominator = \"kept\"",
       3,
       "denominator",
       "kept",
       {"inert", "drops no tokens"}},
      {"ABandThatHoldsEverything",
       "preset = \"icepop\"\nicepop_ratio_low = 0\nicepop_ratio_high = inf",
       3,
       "icepop_ratio_low",
       "0",
       {"inert", "icepop_ratio_high"}},
      {"NoPolicyTermLeft", "preset = \"ppo\"\nadv_tau = 0", 3, "adv_tau", "0", {"teacher_tau"}},
      {"ASequenceBoundNothingExceeds",
       "preset = \"seq_mis\"\nseq_ratio_high = inf",
       3,
       "seq_ratio_high",
       "inf",
       {"inert"}},
      {"AKlBoundNothingExceeds",
       "preset = \"kpop\"\nkpop_threshold = inf",
       3,
       "kpop_threshold",
       "inf",
       {"inert"}},
      {"AMomentNothingExceeds",
       "preset = \"m2po\"\nm2_threshold = inf",
       3,
       "m2_threshold",
       "inf",
       {"inert"}},
      {"ADifferenceNothingExceeds",
       "preset = \"dppo_tv\"\ndppo_diff_low = 1\ndppo_diff_high = 1",
       3,
       "dppo_diff",
       "1",
       {"inert"}},
  };
}
INSTANTIATE_TEST_SUITE_P(Inert, BadLossTable, testing::ValuesIn(inert()), row_name);

// Keys that other code bases, or earlier versions, use with another meaning.
std::vector<Row> renamed() {
  return {
      {"DppoMaskLowOnIcepop",
       "preset = \"icepop\"\ndppo_mask_low = 0.2",
       3,
       "dppo_mask_low",
       "0.2",
       {"probability difference", "ratio bound", "icepop_ratio_low", "dppo_diff_low"}},
      {"DppoMaskHighOnDppoTv",
       "preset = \"dppo_tv\"\ndppo_mask_high = 5",
       3,
       "dppo_mask_high",
       "5",
       {"probability difference", "ratio bound", "dppo_diff_high", "ipo_ratio_high"}},
      {"KlTauOnIcepop",
       "preset = \"icepop\"\nkl_tau = 1e-3",
       3,
       "kl_tau",
       "0.001",
       {"ipo_kl", "dppo_kl", "kept tokens"}},
      {"KlTauOnDppoTv",
       "preset = \"dppo_tv\"\nkl_tau = 0.5",
       3,
       "kl_tau",
       "0.5",
       {"ipo_kl", "dppo_kl"}},
      {"EpsClipOnGrpo",
       "preset = \"grpo\"\neps_clip = 0.25",
       3,
       "eps_clip",
       "0.25",
       {"eps_low", "eps_high", "tis_clip"}},
      {"TisClipOnGrpoTis",
       "preset = \"grpo+tis\"\ntis_clip = 2.5",
       3,
       "tis_clip",
       "2.5",
       {"tis_cap", "absolute", "eps_clip"}},
      {"TisClipLowOnIcepopTis",
       "preset = \"ppo+icepop_tis\"\ntis_clip_low = 0.5",
       3,
       "tis_clip_low",
       "0.5",
       {"tis_ratio_low"}},
      {"ClipRatioC", "preset = \"ppo\"\nclip_ratio_c = 3", 3, "clip_ratio_c", "3", {"dual_clip"}},
      {"KlBeta", "preset = \"grpo\"\nkl_beta = 0.01", 3, "kl_beta", "0.01", {"ref_kl"}},
      {"LossAggMode",
       "preset = \"grpo\"\nloss_agg_mode = \"token-mean\"",
       3,
       "loss_agg_mode",
       "token-mean",
       {"reduction"}},
      {"IpoThreshold",
       "preset = \"ipo_kl\"\nipo_threshold = 0.3",
       3,
       "ipo_threshold",
       "0.3",
       {"dppo_tv", "dppo_diff_low"}},
  };
}
INSTANTIATE_TEST_SUITE_P(Renamed, BadLossTable, testing::ValuesIn(renamed()), row_name);

std::vector<Row> bad_presets() {
  return {
      {"ASlipOfTheFinger",
       "eps_low = 0.1\npreset = \"gprpo\"",
       3,
       "preset",
       "gprpo",
       {"did you mean grpo?"}},
      {"NothingLikeIt", "preset = \"frobnicate\"", 2, "preset", "frobnicate", {"leeway loss list"}},
      {"Empty", "preset = \"\"", 2, "preset", "\"\"", {"leeway loss list"}},
      {"ACorrectionAlone", "preset = \"tis\"", 2, "preset", "tis", {"ppo+tis"}},
      {"AnUnknownCorrection",
       "preset = \"ppo+tiss\"",
       2,
       "preset",
       "ppo+tiss",
       {"did you mean tis?"}},
      {"ACorrectionTwice", "preset = \"ppo+tis+tis\"", 2, "preset", "ppo+tis+tis", {"twice"}},
      {"ThreeCorrections",
       "preset = \"ppo+tis+icepop_tis+off_policy_is\"",
       2,
       "preset",
       "ppo+tis+icepop_tis+off_policy_is",
       {"two"}},
      {"AnUnknownForeignOne",
       "preset = \"verl/vanila\"",
       2,
       "preset",
       "verl/vanila",
       {"did you mean verl/vanilla?"}},
      {"AnUnknownFamily",
       "preset = \"nowhere/loss\"",
       2,
       "preset",
       "nowhere/loss",
       {"leeway loss list"}},
      {"AForeignValueOfTheWrongType",
       "preset = \"verl/vanilla\"\nclip_ratio = \"wide\"",
       3,
       "clip_ratio",
       "wide",
       {"must be a number"}},
  };
}
INSTANTIATE_TEST_SUITE_P(Presets, BadLossTable, testing::ValuesIn(bad_presets()), row_name);

// ---------------------------------------------------------------------------------------------

struct WholeRow {
  std::string name, text;
  std::vector<std::string> words;
};

void PrintTo(const WholeRow& row, std::ostream* stream) { *stream << row.name; }

class BadConfigFile : public testing::TestWithParam<WholeRow> {};

TEST_P(BadConfigFile, IsRefusedWithItsPlace) {
  const TempFolder folder;
  const std::string file = folder.write("run.toml", GetParam().text);
  std::vector<std::string> words = GetParam().words;
  words.push_back(file);
  expect_mistake(run_program({"config", file}), words);
}

const std::vector<WholeRow> kBadFiles = {
    {"AnUnclosedString", "[trainer.loss]\npreset = \"icepop\n", {"line 2", "TOML"}},
    {"AnUnclosedTable", "[trainer.loss\npreset = \"icepop\"\n", {"line 1", "TOML"}},
    {"AKeyWithoutAValue", "[trainer.loss]\n\npreset =\n", {"line 3", "TOML"}},
    {"AKeyTwice", "[trainer.loss]\nadv_tau = 1\nadv_tau = 2\n", {"line 3", "TOML", "adv_tau"}},
    {"ATableTwice", "[trainer.loss]\n[trainer.loss]\n", {"line 2", "TOML"}},
    {"Json", "{\"trainer\": {\"loss\": {}}}\n", {"line 1", "TOML"}},
    {"NulBytes", std::string("[trainer.loss]\npreset = \"ice\0pop\"\n", 34), {"line 2"}},
    {"BytesThatAreNoText", "[trainer.loss]\npreset = \"\xff\xfe\"\n", {"line 2", "TOML"}},
    {"DeepNesting", "a = " + std::string(100000, '['), {"line 1", "TOML"}},
    {"DeepTables", "a." + std::string(100, 'b') + " = " + std::string(5000, '{'), {"line 1"}},
    {"AnUnknownTable", "[trainr.loss]\n", {"line 1", "trainr", "did you mean trainer?"}},
    {"AnUnknownTableBesideLoss", "[trainer.los]\n", {"line 1", "trainer.los", "trainer.loss"}},
    {"AnUnknownKey", "\nlearning_rat = 3\n", {"line 2", "learning_rat", "3", "trainer"}},
    {"ANumberForATable", "trainer = 3\n", {"line 1", "trainer", "3", "table"}},
    {"ANumberForTheLossTable", "[trainer]\nloss = 3\n", {"line 2", "trainer.loss", "3", "table"}},
    {"AListOfTables", "[[trainer.loss]]\npreset = \"ppo\"\n", {"line 1", "trainer.loss", "table"}},
    {"AKeyOfTheRunMisspelt",
     "[trainer]\nmax_stesp = 3\n",
     {"line 2", "trainer.max_stesp = 3", "did you mean trainer.max_steps?"}},
    {"AKeyInTheWrongTable",
     "[trainer]\ngroup_size = 3\n",
     {"line 2", "trainer.group_size = 3", "did you mean orchestrator.group_size?"}},
    {"AFractionForAnInteger",
     "[orchestrator]\ngroup_size = 1.5\n",
     {"line 2", "orchestrator.group_size = 1.5", "an integer, 1 to"}},
    {"AnIntegerOutOfRange", "\nseed = -1\n", {"line 2", "seed = -1", "0 to"}},
    {"TextForATruth", "[eval]\ngreedy = \"yes\"\n", {"line 2", "\"yes\"", "true or false"}},
    {"ARateThatIsNoNumber", "[sft]\nlearning_rate = nan\n", {"line 2", "nan", "finite number"}},
    {"NoneOfTheSchedules",
     "[trainer]\nschedule = \"linar\"\n",
     {"line 2", "linar", "constant, linear, cosine", "did you mean linear?"}},
    {"AFinalRateWithoutASchedule",
     "[trainer]\nfinal_rate = 0.1\n",
     {"line 2", "trainer.final_rate = 0.1", "inert", "trainer.schedule"}},
    {"AFolderAndAShape",
     "[model]\npath = \"m\"\nhidden_size = 8\n",
     {"line 3", "model.hidden_size = 8", "model.path = \"m\""}},
    {"ATeacherWithoutALossForIt",
     "[trainer]\nteacher = \"t\"\n",
     {"line 2", "trainer.teacher", "inert", "teacher_tau"}},
    {"ALossWithoutItsTeacher",
     "[trainer.loss]\nteacher_tau = 1\n",
     {"line 2", "teacher_tau = 1", "trainer.teacher"}},
    {"OneEnvironmentAsATable",
     "[environment]\nname = \"sort\"\n",
     {"line 1", "environment", "[[environment]]"}},
    {"AnEnvironmentWithoutAName", "[[environment]]\nweight = 2\n", {"line 1", "no name", "sort"}},
    {"AKeyOfAnotherEnvironment",
     "[[environment]]\nname = \"sort\"\nterms = 3\n",
     {"line 3", "environment.0.terms = 3", "arithmetic and calculator"}},
    {"TwoEnvironmentsOfOneId",
     "[[environment]]\nname = \"sort\"\nid = \"a\"\n[[environment]]\nname = \"sort\"\nid = \"a\"\n",
     {"line 6", "environment.1.id = \"a\"", "environment.0.id", "different ids"}},
};
INSTANTIATE_TEST_SUITE_P(Table, BadConfigFile, testing::ValuesIn(kBadFiles),
                         [](const auto& row) { return row.param.name; });

// ---------------------------------------------------------------------------------------------

TEST(BadSet, NamesTheOptionTheKeyTheValueAndTheRemedy) {
  struct SetRow {
    std::string preset, set;
    std::vector<std::string> words;
  };
  const std::vector<SetRow> rows = {
      {"ppo", "eps_hihg=0.3", {"--set", "eps_hihg", "0.3", "did you mean eps_high?"}},
      {"ppo", "eps_high=wide", {"--set", "eps_high", "wide", "must be a number"}},
      {"ppo", "eps_high=", {"--set", "eps_high", "must be a number"}},
      {"ppo", "eps_high=0.3 0.4", {"--set", "eps_high", "0.3 0.4", "must be a number"}},
      {"ppo", "eps_high=[1]", {"--set", "eps_high", "[1]"}},
      {"ppo", "eps_high", {"--set", "eps_high", "key=value"}},
      {"ppo", "=3", {"--set", "=3", "key=value"}},
      {"icepop", "eps_low=0.3", {"--set", "eps_low", "0.3", "belongs to ppo"}},
      {"icepop", "dppo_mask_low=0.2", {"--set", "dppo_mask_low", "0.2", "dppo_diff_low"}},
      {"icepop", "icepop_ratio_low=7", {"--set", "icepop_ratio_low", "7", "must not exceed"}},
      {"verl/vanilla", "clip_ratio=wide", {"--set", "clip_ratio", "wide", "must be a number"}}};
  for (const SetRow& row : rows) {
    SCOPED_TRACE(row.preset + " --set " + row.set);
    expect_mistake(eval(row.preset, kBatch, {row.set}), row.words);
    expect_mistake(run_program({"loss", "explain", row.preset, "--set", row.set}), row.words);
  }
}

TEST(BadSet, OfAConfigAsksForTheWholePath) {
  const TempFolder folder;
  const std::string file = folder.write("run.toml", "[trainer.loss]\npreset = \"ppo\"\n");
  auto set = [&](const std::string& assignment) {
    return run_program({"config", file, "--set", assignment});
  };
  expect_mistake(set("eps_low=0.5"), {"--set", "eps_low", "0.5", "trainer.loss.eps_low"});
  expect_mistake(set("trainer.los.eps_low=0.5"), {"--set", "trainer.los.eps_low", "0.5"});
  expect_mistake(set("trainer.loss.eps_lo=0.5"),
                 {"--set", "trainer.loss.eps_lo", "0.5", "did you mean", "eps_low"});
  expect_mistake(set("trainer.loss.preset=gprpo"),
                 {"--set", "trainer.loss.preset", "gprpo", "did you mean grpo?"});
  expect_mistake(set("trainer.loss.preset=3"), {"--set", "trainer.loss.preset", "3", "text"});
}

TEST(BadSet, OfARunNamesTheKeyTheValueAndTheRemedy) {
  const TempFolder folder;
  const std::string file = folder.write("run.toml", "[[environment]]\nname = \"sort\"\n");
  auto set = [&](const std::string& assignment) {
    return run_program({"config", file, "--set", assignment});
  };
  expect_mistake(set("max_steps=5"), {"--set max_steps = 5", "trainer.max_steps"});
  expect_mistake(set("trainer.max_steps=0"), {"--set trainer.max_steps = 0", "1 to"});
  expect_mistake(set("trainer=0"), {"--set trainer = 0", "table"});
  expect_mistake(set("output_dir=7"), {"--set output_dir = 7", "quotes"});
  expect_mistake(set("environment.1.max_length=9"),
                 {"--set environment.1.max_length = 9", "there is one environment"});
  expect_mistake(set("environment.max_length=99"),
                 {"--set environment.0.max_length = 99", "1 to 26"});
}

TEST(BadReference, StandsAlone) {
  expect_mistake(run_program({"config", "--reference", "x.toml"}), {"--reference"});
  expect_mistake(run_program({"config", "--reference", "--example"}), {"--reference"});
  expect_mistake(run_program({"config", "--reference", "--json"}), {"--reference"});
  const RunResult page = run_program({"config", "--reference"});
  EXPECT_EQ(page.code, 0) << page;
  EXPECT_TRUE(contains(page.out, "`max_error_reschedule_attempts`")) << page;
}

TEST(BadSet, IsRefusedAfterAGoodConfig) {
  const TempFolder folder;
  const std::string batch = folder.write("batch.json", kBatch);
  const std::string file =
      folder.write("run.toml", "[trainer.loss]\npreset = \"icepop\"\nicepop_ratio_low = 2\n");
  expect_mistake(run_program({"loss", "eval", "--config", file, "--batch", batch, "--set",
                              "icepop_ratio_high=1.5"}),
                 {"icepop_ratio_low", "must not exceed icepop_ratio_high"});
  // A key of the file that does not exist in the command line's preset is dropped with its preset.
  const RunResult other =
      run_program({"loss", "eval", "--config", file, "--batch", batch, "--set", "preset=ppo"});
  EXPECT_EQ(other.code, 0) << other;
  EXPECT_TRUE(contains(other.err, "icepop_ratio_low = 2 (" + file + " line 3)")) << other;
}

}  // namespace
}  // namespace leeway
