// The program end to end: `loss check` and `loss compare`.

#include <gtest/gtest.h>

#include <functional>

#include "cli_helpers.h"

namespace leeway {
namespace {

std::string golden_with(const std::function<void(Document&)>& change) {
  Document golden = json_of(file_text(kGolden));
  change(golden);
  return text_of(golden);
}

Json& case_of(Document& golden, const std::string& name) {
  for (Json& entry : golden["cases"].GetArray()) {
    if (entry["name"].GetString() == name) return entry;
  }
  throw std::runtime_error("no case " + name);
}

RunResult check(const std::string& golden, const std::vector<std::string>& more = {}) {
  const TempFolder folder;
  std::vector<std::string> args = {"loss", "check", folder.write("golden.json", golden)};
  args.insert(args.end(), more.begin(), more.end());
  return run_program(args);
}

TEST(LossCheck, AgreesWithEveryGoldenCase) {
  const RunResult result = run_program({"loss", "check", kGolden});
  expect_quiet_success(result);
  const std::vector<std::string> lines = lines_of(result.out);
  ASSERT_EQ(lines.size(), 184u);
  for (size_t i = 0; i + 1 < lines.size(); ++i)
    EXPECT_TRUE(lines[i].starts_with("ok ")) << lines[i];
  EXPECT_TRUE(contains(lines.back(), "183 agree")) << lines.back();
  EXPECT_TRUE(contains(lines.back(), "0 differ")) << lines.back();
}

TEST(LossCheck, NamesTheCaseWhoseNumberWasChanged) {
  const std::string name = "prime/default_dppo_kl/seqA";
  const std::function<void(Json&)> changes[] = {
      [](Json& entry) { entry["loss"].SetDouble(entry["loss"].GetDouble() * (1 + 1e-5)); },
      [](Json& entry) { entry["grad"][1][3].SetDouble(entry["grad"][1][3].GetDouble() + 1e-6); },
      [](Json& entry) { entry["metrics"]["is_masked"][2].SetDouble(0.5); }};
  for (const auto& change : changes) {
    const RunResult result =
        check(golden_with([&](Document& golden) { change(case_of(golden, name)); }));
    EXPECT_EQ(result.code, 1) << result;
    size_t different = 0;
    for (const std::string& line : lines_of(result.out)) {
      if (!line.starts_with("DIFF")) continue;
      ++different;
      EXPECT_TRUE(contains(line, name)) << line;
    }
    EXPECT_EQ(different, 1u) << result.out;
    EXPECT_TRUE(contains(result.out, "182 agree, 1 differ")) << result.out;
  }
}

TEST(LossCheck, PrintsEveryCaseAsJson) {
  const Document golden = json_of(file_text(kGolden));
  const RunResult result = run_program({"loss", "check", kGolden, "--json"});
  expect_quiet_success(result);
  const Document json = json_of(result.out);
  ASSERT_EQ(json["cases"].Size(), golden["cases"].Size());
  for (rapidjson::SizeType i = 0; i < json["cases"].Size(); ++i) {
    const Json &got = json["cases"][i], &expected = golden["cases"][i];
    SCOPED_TRACE(expected["name"].GetString());
    EXPECT_EQ(text_of(got["name"]), text_of(expected["name"]));
    EXPECT_TRUE(got["ok"].IsTrue());
    ASSERT_TRUE(got.HasMember("loss") && got.HasMember("grad") && got["metrics"].IsObject());
    if (expected.HasMember("loss")) {
      EXPECT_NEAR(got["loss"].GetDouble(), expected["loss"].GetDouble(), 2e-5);
      ASSERT_EQ(got["grad"].Size(), 3u);
      for (rapidjson::SizeType s = 0; s < 3; ++s) {
        EXPECT_EQ(got["grad"][s].Size(), golden["fixture"]["lens"][s].GetUint());
      }
    }
    // Metrics have the source's names and shapes.
    const std::string name = expected["name"].GetString();
    const bool owed = name.starts_with("prime/") || name.starts_with("cookbook_PR169/") ||
                      (name.starts_with("slime/") && contains(name, "PR2084"));
    if (!owed || !expected.HasMember("metrics")) continue;
    for (const auto& metric : expected["metrics"].GetObject()) {
      ASSERT_TRUE(got["metrics"].HasMember(metric.name)) << metric.name.GetString();
      const Json& value = got["metrics"][metric.name];
      EXPECT_EQ(value.IsArray(), metric.value.IsArray()) << metric.name.GetString();
      if (!value.IsArray()) continue;
      EXPECT_EQ(value.Size(), metric.value.Size()) << metric.name.GetString();
    }
  }
}

// Everything that can be computed is computed, whether or not it was expected.
TEST(LossCheck, ComputesTheSameWhereNothingIsExpected) {
  const std::string bare = golden_with([](Document& golden) {
    for (Json& entry : golden["cases"].GetArray()) {
      for (const char* key :
           {"loss", "grad", "metrics", "outputs", "mask", "weights", "source", "note"}) {
        entry.RemoveMember(key);
      }
    }
  });
  const RunResult result = check(bare, {"--json"});
  expect_quiet_success(result);
  EXPECT_EQ(result.out, run_program({"loss", "check", kGolden, "--json"}).out);
}

TEST(LossCheck, ComputesCasesThatHoldOnlyAName) {
  const Document golden = json_of(file_text(kGolden));
  const std::string bare = golden_with([](Document& changed) {
    for (Json& entry : changed["cases"].GetArray()) {
      Json only(rapidjson::kObjectType);
      only.AddMember("name", entry["name"], changed.GetAllocator());
      entry = only;
    }
  });
  const RunResult result = check(bare, {"--json"});
  EXPECT_LE(result.code, 1) << result;
  const Document json = json_of(result.out);
  ASSERT_EQ(json["cases"].Size(), golden["cases"].Size());
  for (rapidjson::SizeType i = 0; i < json["cases"].Size(); ++i) {
    const Json& got = json["cases"][i];
    SCOPED_TRACE(got["name"].GetString());
    // Its data, the versions, is in its config.
    if (got["name"] == "areal/prox_approx") continue;
    EXPECT_TRUE(got["ok"].IsTrue()) << text_of(got);
    EXPECT_EQ(got["loss"].IsNumber(), golden["cases"][i].HasMember("loss"));
    EXPECT_TRUE(got["loss"].IsNumber() || !got["metrics"].ObjectEmpty());
  }
}

TEST(LossCheck, ComputesNativePresetsByName) {
  const std::string golden = golden_with([](Document& changed) {
    changed["cases"].SetArray();
    for (const std::string& preset : names().native) {
      Json entry(rapidjson::kObjectType), name(preset.c_str(), changed.GetAllocator());
      entry.AddMember("name", name, changed.GetAllocator());
      changed["cases"].PushBack(entry, changed.GetAllocator());
    }
  });
  const RunResult result = check(golden, {"--json"});
  expect_quiet_success(result);
  const Document json = json_of(result.out);
  for (const Json& entry : json["cases"].GetArray()) {
    EXPECT_TRUE(entry["loss"].IsNumber()) << text_of(entry);
  }
}

TEST(LossCheck, DoesNotTakeANumberForAnExpectedInfinity) {
  const RunResult result = check(
      R"({"fixture": {"pi": [[-1, -2]], "rollout": [[-1, -2.1]], "adv_seq": [1]},
          "cases": [{"name": "prime/ipo", "loss": Infinity}]})");
  EXPECT_EQ(result.code, 1) << result;
}

TEST(LossCheck, ReportsACaseOfAnUnknownPresetAndGoesOn) {
  const RunResult result = check(
      R"({"fixture": {"pi": [[-1, -2]], "rollout": [[-1, -2.1]], "adv_seq": [1]},
          "cases": [{"name": "verl/vanila"}, {"name": "prime/ipo"}]})");
  EXPECT_EQ(result.code, 1) << result;
  EXPECT_TRUE(contains(result.out, "DIFF  verl/vanila")) << result.out;
  EXPECT_TRUE(contains(result.out, "did you mean verl/vanilla?")) << result.out;
  EXPECT_TRUE(contains(result.out, "ok    prime/ipo")) << result.out;
}

// ---------------------------------------------------------------------------------------------

RunResult compare(const std::string& batch, const std::vector<std::string>& more = {}) {
  std::vector<std::string> args = {"loss", "compare", "--batch", "/dev/stdin"};
  args.insert(args.end(), more.begin(), more.end());
  return run_program(args, {.input = batch});
}

TEST(LossCompare, ShowsEveryNativePresetInATable) {
  const RunResult result = compare(kBatch);
  expect_quiet_success(result);
  for (const std::string& preset : names().native) {
    EXPECT_TRUE(contains(result.out, "\n" + preset + " ")) << preset << "\n" << result.out;
  }
  EXPECT_TRUE(contains(result.out, "4 trained tokens in 2 sequences")) << result.out;
}

TEST(LossCompare, UsesABuiltInExampleAndSaysSo) {
  const RunResult result = run_program({"loss", "compare", "--preset", "icepop", "--json"});
  EXPECT_EQ(result.code, 0) << result;
  EXPECT_TRUE(contains(result.err, "built-in example")) << result.err;
  EXPECT_GT(json_of(result.out)["tokens"].GetDouble(), 1000);
  EXPECT_EQ(run_program({"loss", "compare", "--preset", "icepop", "--json"}).out, result.out);
}

TEST(LossCompare, PrintsTheLossesThatEvalGives) {
  const RunResult result = compare(kBatch, {"--json"});
  expect_quiet_success(result);
  const Document json = json_of(result.out);
  EXPECT_GE(json["presets"].Size(), names().native.size());
  EXPECT_EQ(json["tokens"].GetDouble(), 4);
  EXPECT_TRUE(json["target_masked"].IsNull());
  for (const Json& row : json["presets"].GetArray()) {
    SCOPED_TRACE(row["preset"].GetString());
    ASSERT_TRUE(row["unavailable"].IsNull()) << text_of(row);
    const Document alone = json_of(eval(row["preset"].GetString(), kBatch).out);
    EXPECT_EQ(row["loss"].GetDouble(), alone["loss"].GetDouble());
    EXPECT_LE(row["kept_share"].GetDouble(), 1.0);
  }
}

TEST(LossCompare, TakesSettingsAfterAColon) {
  const RunResult result = compare(
      kBatch, {"--json", "--preset", "ppo:anchor=rollout,eps_low=0.25", "--preset", "icepop"});
  expect_quiet_success(result);
  const Document json = json_of(result.out);
  ASSERT_EQ(json["presets"].Size(), 2u);
  const Json& row = json["presets"][0];
  EXPECT_EQ(std::string(row["settings"]["anchor"].GetString()), "rollout");
  EXPECT_EQ(std::string(row["settings"]["eps_low"].GetString()), "0.25");
  const Document alone = json_of(eval("ppo", kBatch, {"anchor=rollout", "eps_low=0.25"}).out);
  EXPECT_EQ(row["loss"].GetDouble(), alone["loss"].GetDouble());
}

TEST(LossCompare, RefusesBadSettingsInTheWordsOfTheOption) {
  expect_mistake(compare(kBatch, {"--preset", "nosuch"}), {"nosuch", "loss list"});
  expect_mistake(compare(kBatch, {"--preset", "icepp"}), {"icepp", "did you mean icepop?"});
  expect_mistake(compare(kBatch, {"--preset", "grpo:eps_hihg=0.3"}),
                 {"--preset grpo", "eps_hihg", "0.3", "did you mean eps_high?"});
  expect_mistake(compare(kBatch, {"--preset", "grpo:eps_high=wide"}),
                 {"--preset grpo", "eps_high", "wide", "must be a number"});
  expect_mistake(compare(kBatch, {"--preset", "grpo:eps_high"}),
                 {"--preset", "grpo", "eps_high", "key=value"});
  expect_mistake(compare(kBatch, {"--preset", "grpo:preset=ppo"}), {"--preset", "preset"});
}

TEST(LossCompare, FindsThresholdsThatMaskAtMostTheShareAskedFor) {
  for (const char* share : {"0%", "0.5%", "0.05", "50%"}) {
    SCOPED_TRACE(share);
    const RunResult result = run_program({"loss", "compare", "--json", "--target-masked", share});
    EXPECT_EQ(result.code, 0) << result;
    const Document json = json_of(result.out);
    const double asked = json["target_masked"].GetDouble();
    size_t found = 0;
    for (const Json& row : json["presets"].GetArray()) {
      if (row["target"].IsNull()) continue;
      ++found;
      EXPECT_LE(row["target"]["masked"].GetDouble(), asked + 1e-12) << text_of(row);
      EXPECT_FALSE(row["target"]["settings"].ObjectEmpty());
    }
    EXPECT_GE(found, 5u);
  }
  const RunResult text = run_program({"loss", "compare", "--target-masked", "0.5%"});
  EXPECT_TRUE(contains(text.out, "Thresholds that mask at most 0.50%")) << text.out;
}

TEST(LossCompare, FindsAThresholdBesideATokenOfExtremeRatio) {
  const RunResult result = compare(
      R"({"sequences": [{"pi": [-0.0, -0.1], "rollout": [-709.0, -0.1], "advantages": 1}]})",
      {"--preset", "icepop", "--target-masked", "0%"});
  EXPECT_EQ(result.code, 0) << result;
}

TEST(LossCompare, RefusesASharePastOneOrOfNoNumber) {
  for (const char* share : {"100%", "1", "150%", "-1%", "half", "5%%", "nan", "%", ""}) {
    SCOPED_TRACE(share);
    expect_mistake(compare(kBatch, {"--target-masked", share}), {"--target-masked", share, "0.5%"});
  }
}

TEST(LossCompare, WritesOnePageAndNothingElse) {
  const TempFolder folder;
  const std::string batch = folder.write("batch.json", kBatch);
  std::filesystem::create_directory(folder / "out");
  const std::string page = folder / "out/page.html";
  const RunResult result =
      run_program({"loss", "compare", "--batch", batch, "--html", page, "--json"});
  EXPECT_EQ(result.code, 0) << result;
  EXPECT_TRUE(contains(result.err, page)) << result.err;
  json_of(result.out);
  EXPECT_TRUE(file_text(page).starts_with("<!DOCTYPE html>"));
  EXPECT_TRUE(contains(file_text(page), "icepop"));
  size_t files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder / "out")) {
    ++files, (void)entry;
  }
  EXPECT_EQ(files, 1u);
  expect_mistake(run_program({"loss", "compare", "--batch", batch, "--html", folder / "no/x.html"}),
                 {"no/x.html"});
}

TEST(LossCompare, SaysWhichPresetsTheBatchCannotServe) {
  const RunResult result = compare(batch_without({"prox"}));
  expect_quiet_success(result);
  EXPECT_TRUE(contains(result.out, "not shown: grpo+tis: needs the stream prox")) << result.out;
  // The rollout policy is used as the anchor where possible.
  EXPECT_FALSE(contains(result.out, "not shown: ppo:")) << result.out;
}

}  // namespace
}  // namespace leeway
