#include "report/run_folder.h"

#include <gtest/gtest.h>

#include "leeway/error.h"
#include "report/test_support.h"

namespace leeway {
namespace {

// Parses the result, so that invalid JSON fails the test.
rapidjson::Document read_run(const std::string& folder, const RolloutLimits& limits = {}) {
  return parse_json("run", run_folder_json(folder, "name", limits));
}

std::string error_of(const std::string& folder) {
  try {
    run_folder_json(folder, "name");
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

TEST(RunFolder, HoldsEveryValueOfTheMetricsAtItsStep) {
  const std::string folder = fresh_folder("values");
  put_file(folder + "/metrics.jsonl",
           "{\"step\": 1, \"a\": 0.1, \"b\": null}\n"
           "\n"
           "{\"step\": 2, \"a\": NaN, \"c\": 12345678901}\n"
           "{\"a\": -3e-9, \"step\": 5, \"b\": 7}\n");
  const rapidjson::Document run = read_run(folder);
  const auto& table = run["metrics"];
  ASSERT_EQ(table["step"].Size(), 3u);
  EXPECT_EQ(table["step"][2].GetDouble(), 5.0);
  const auto& columns = table["columns"];
  ASSERT_EQ(columns.MemberCount(), 3u);
  for (const auto& column : columns.GetObject()) EXPECT_EQ(column.value.Size(), 3u);
  EXPECT_EQ(columns["a"][0].GetDouble(), 0.1);
  EXPECT_TRUE(columns["a"][1].IsNull());
  EXPECT_EQ(columns["a"][2].GetDouble(), -3e-9);
  EXPECT_TRUE(columns["b"][0].IsNull());
  EXPECT_TRUE(columns["b"][1].IsNull());
  EXPECT_EQ(columns["b"][2].GetDouble(), 7.0);
  EXPECT_EQ(columns["c"][1].GetDouble(), 12345678901.0);
}

TEST(RunFolder, CutAtAnyByteReadsUpToTheLastWholeLine) {
  const std::string folder = fresh_folder("cut");
  const std::string first = "{\"step\": 1, \"a\": 0.5}\n", second = "{\"step\": 2, \"a\": 0.25}\n";
  const std::string whole = first + second;
  for (size_t length = 0; length <= whole.size(); ++length) {
    put_file(folder + "/metrics.jsonl", whole.substr(0, length));
    const size_t expected = length >= whole.size() - 1 ? 2 : length >= first.size() - 1 ? 1 : 0;
    EXPECT_EQ(read_run(folder)["metrics"]["step"].Size(), expected) << length;
  }
}

TEST(RunFolder, AStepThatComesAgainReplacesTheOlderOnes) {
  const std::string folder = fresh_folder("resumed");
  std::string text;
  for (const int step : {1, 2, 3, 4, 5, 3, 4}) {
    text += fmt::format("{{\"step\": {}, \"line\": {}}}\n", step, text.size());
  }
  put_file(folder + "/metrics.jsonl", text);
  const rapidjson::Document run = read_run(folder);
  const auto& steps = run["metrics"]["step"];
  const auto& lines = run["metrics"]["columns"]["line"];
  ASSERT_EQ(steps.Size(), 4u);
  ASSERT_EQ(lines.Size(), 4u);
  for (unsigned k = 0; k < 4; ++k) EXPECT_EQ(steps[k].GetDouble(), k + 1.0);
  for (unsigned k = 1; k < 4; ++k) EXPECT_GT(lines[k].GetDouble(), lines[k - 1].GetDouble());
}

TEST(RunFolder, SaysWhyTheRunEnded) {
  const std::string folder = fresh_folder("end");
  put_file(folder + "/metrics.jsonl", "{\"step\": 1}\n");
  EXPECT_TRUE(read_run(folder)["end"].IsNull());
  put_file(folder + "/end.json",
           "{\"end\": \"gave_up\", \"reason\": \"the <disk> is full\", \"steps\": 7}\n");
  const rapidjson::Document run = read_run(folder);
  EXPECT_STREQ(run["end"]["end"].GetString(), "gave_up");
  EXPECT_STREQ(run["end"]["reason"].GetString(), "the <disk> is full");
  EXPECT_EQ(run["end"]["steps"].GetDouble(), 7.0);
  for (const char* damaged :
       {"", "{\"end\": ", "[]", "{\"end\": 3, \"reason\": \"\", \"steps\": 1}"}) {
    put_file(folder + "/end.json", damaged);
    EXPECT_TRUE(read_run(folder)["end"].IsNull()) << damaged;
  }
}

TEST(RunFolder, SaysWhatIsNoRunFolder) {
  const std::string folder = fresh_folder("empty");
  EXPECT_EQ(error_of(folder), folder + ": has no metrics.jsonl; is it a run folder?");
  EXPECT_EQ(error_of(folder + "/none"), folder + "/none: there is no such folder");
  put_file(folder + "/file", "");
  EXPECT_EQ(error_of(folder + "/file"),
            folder + "/file: has no metrics.jsonl; is it a run folder?");
}

TEST(RunFolder, NamesFileAndLineOfWhatIsDamagedAndShowsTheRest) {
  const std::string folder = fresh_folder("wrong");
  const std::string metrics = folder + "/metrics.jsonl";
  put_file(metrics, "{\"step\": 1}\nno json\n{\"step\": 3}\n");
  ReportNotes notes;
  const std::string text = run_folder_json(folder, "name", {}, &notes);
  const rapidjson::Document run = parse_json("run", text);
  EXPECT_EQ(run["metrics"]["step"].Size(), 2u);
  ASSERT_EQ(run["notes"].Size(), 1u);
  ASSERT_EQ(notes.size(), 1u);
  EXPECT_EQ(run["notes"][0].GetString(), notes[0]);
  EXPECT_NE(notes[0].find(metrics + " line 2"), std::string::npos) << notes[0];
  put_file(metrics, "no json\n");
  EXPECT_TRUE(error_of(folder).starts_with(metrics + " line 1")) << error_of(folder);
  put_file(metrics, "{\"step\": 1}\n");
  EXPECT_EQ(read_run(folder)["notes"].Size(), 0u);

  const std::string rollouts = folder + "/rollouts/step_1.jsonl";
  const std::string good = "{\"step\": 1, \"samples\": []}\n";
  for (const std::string line :
       {"{}", "{\"step\": 1}", "{\"step\": 1, \"samples\": 3}", "{\"step\": 1, \"samples\": [3]}",
        "{\"step\": 1, \"samples\": [{\"tokens\": [\"a\"], \"ids\": []}]}"}) {
    put_file(rollouts, line + "\n" + good);
    const rapidjson::Document read = read_run(folder);
    EXPECT_EQ(read["rollouts"].Size(), 1u);
    ASSERT_EQ(read["notes"].Size(), 1u);
    EXPECT_NE(std::string(read["notes"][0].GetString()).find(rollouts + " line 1"),
              std::string::npos);
  }
  // Nested as deeply as a hostile file might be.
  for (const char* name : {"/rollouts/step_1.jsonl", "/given_up.jsonl"}) {
    put_file(folder + name, "{\"step\": 1, \"samples\": [], \"x\": " + std::string(100000, '[') +
                                std::string(100000, ']') + "}\n" + good);
    EXPECT_NE(std::string(read_run(folder)["notes"][0].GetString()).find("nested"),
              std::string::npos);
  }
}

TEST(RunFolder, ReadsEveryFileOfARun) {
  const std::string folder = fresh_folder("whole");
  make_run(folder, {.steps = 40, .max_steps = 40});
  const rapidjson::Document run = read_run(folder);
  EXPECT_EQ(run["metrics"]["step"].Size(), 40u);
  EXPECT_EQ(run["eval"]["step"].Size(), 3u);
  EXPECT_EQ(run["sft"]["step"].Size(), 60u);
  EXPECT_EQ(run["rollouts"].Size(), 46u);  // 16 of the last file, 10 of each other one
  EXPECT_EQ(run["rollout_steps"].Size(), 4u);
  EXPECT_NE(std::string(run["objective"].GetString()).find("keep_t"), std::string::npos);
  EXPECT_NE(std::string(run["config"].GetString()).find("[trainer.loss]"), std::string::npos);
  EXPECT_GT(run["config_entries"].Size(), 5u);
}

TEST(RunFolder, TakesTheFirstAndTheLastRolloutsWithinTheLimits) {
  const std::string folder = fresh_folder("limits");
  make_run(folder, {.steps = 200, .groups = 4});
  const rapidjson::Document run = read_run(folder);
  const auto& rollouts = run["rollouts"];
  EXPECT_LE(rollouts.Size(), 64u);
  EXPECT_GE(rollouts.Size(), 48u);
  EXPECT_EQ(run["rollout_steps"].Size(), 20u);
  EXPECT_EQ(rollouts[0]["step"].GetDouble(), 10.0);
  EXPECT_EQ(rollouts[rollouts.Size() - 1]["step"].GetDouble(), 200.0);

  size_t tokens = 0;
  const rapidjson::Document few = read_run(folder, {.files = 3, .rollouts = 64, .tokens = 400});
  for (const auto& rollout : few["rollouts"].GetArray()) {
    for (const auto& sample : rollout["samples"].GetArray()) tokens += sample["tokens"].Size();
  }
  EXPECT_LE(tokens, 400u);
  EXPECT_GE(few["rollouts"].Size(), 3u);
  EXPECT_EQ(read_run(folder, {.files = 1, .rollouts = 5})["rollouts"].Size(), 5u);
}

TEST(RunFolder, KeepsStringsOfRolloutsAsTheyAre) {
  const std::string folder = fresh_folder("strings");
  put_file(folder + "/metrics.jsonl", "");
  put_file(folder + "/rollouts/step_1.jsonl",
           R"({"step": 1, "samples": [{"tokens": ["</script>", "\u0000\n", "\"", "\u00e9"],)"
           R"( "pi": [NaN, -Infinity, 0, -0.5]}]})");
  const rapidjson::Document run = read_run(folder);
  const auto& sample = run["rollouts"][0]["samples"][0];
  EXPECT_STREQ(sample["tokens"][0].GetString(), "</script>");
  EXPECT_EQ(sample["tokens"][1].GetStringLength(), 2u);
  EXPECT_STREQ(sample["tokens"][3].GetString(), "\u00e9");
  EXPECT_TRUE(sample["pi"][0].IsNull());
  EXPECT_TRUE(sample["pi"][1].IsNull());
  EXPECT_EQ(sample["pi"][3].GetDouble(), -0.5);
}

TEST(RunFolder, ConfigEntriesHaveWholeKeysAndOrigins) {
  const auto entries = config_entries(
      "seed = 1  # default\n# a comment\n[trainer.loss]\npreset = \"a # b\"   # x.toml line 2\n"
      "[[environment]]\nname = 'sort'\n[[environment]]\nname = \"jsonl\" # --set\r\n");
  ASSERT_EQ(entries.size(), 4u);
  EXPECT_EQ(entries[0].key, "seed");
  EXPECT_EQ(entries[0].value, "1");
  EXPECT_EQ(entries[0].origin, "default");
  EXPECT_EQ(entries[1].key, "trainer.loss.preset");
  EXPECT_EQ(entries[1].value, "\"a # b\"");
  EXPECT_EQ(entries[1].origin, "x.toml line 2");
  EXPECT_EQ(entries[2].key, "environment[0].name");
  EXPECT_EQ(entries[3].key, "environment[1].name");
  EXPECT_EQ(entries[3].origin, "--set");
}

TEST(RunFolder, NamesTellRunsApart) {
  const std::vector<std::string> folders = {"runs/a", "runs/b/", "other/a"};
  const std::vector<std::string> names = run_names(folders);
  EXPECT_EQ(names, (std::vector<std::string>{"runs/a", "b", "other/a"}));
}

}  // namespace
}  // namespace leeway
