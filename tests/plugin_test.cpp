// A library with a correction, a preset and a metric of one's own (examples/09_plugin), loaded by
// the program.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "base/files.h"
#include "cli_helpers.h"
#include "leeway/plugin.h"

namespace leeway {
namespace {

const std::string kLibrary = LEEWAY_PLUGIN_LIBRARY;
const std::string kBatch = LEEWAY_SOURCE_DIR "/examples/batch.json";

double loss_in(const RunResult& result) {
  EXPECT_EQ(result.code, 0) << result;
  return json_of(result.out)["loss"].GetDouble();
}

TEST(Plugin, ReinforceWithAClippedWeightIsCispo) {
  for (const std::string high : {"1.2", "5"}) {
    const RunResult mine =
        run_program({"loss", "eval", "--plugin", kLibrary, "--preset", "reinforce+mine", "--batch",
                     kBatch, "--set", "mine_high=" + high});
    const RunResult cispo = run_program(
        {"loss", "eval", "--preset", "cispo", "--batch", kBatch, "--set", "ratio_high=" + high});
    EXPECT_NEAR(loss_in(mine), loss_in(cispo), 1e-12);
    const Document a = json_of(mine.out), b = json_of(cispo.out);
    ASSERT_EQ(a["grad"].Size(), b["grad"].Size());
    for (unsigned s = 0; s < a["grad"].Size(); ++s) {
      for (unsigned t = 0; t < a["grad"][s].Size(); ++t) {
        EXPECT_NEAR(a["grad"][s][t].GetDouble(), b["grad"][s][t].GetDouble(), 1e-12);
      }
    }
  }
}

TEST(Plugin, AConfigurationNamesIt) {
  const TempFolder folder;
  const std::string config = folder / "run.toml";
  write_file_atomically(config, "[trainer.loss]\nplugin = \"" + kLibrary +
                                    "\"\npreset = \"reinforce+mine\"\nmine_high = 1.2\n");
  const double from_file =
      loss_in(run_program({"loss", "eval", "--config", config, "--batch", kBatch}));
  const double from_set =
      loss_in(run_program({"loss", "eval", "--config", config, "--batch", kBatch, "--set",
                           "preset=cispo", "--set", "ratio_high=1.2"}));
  EXPECT_NEAR(from_file, from_set, 1e-12);
  // The effective configuration has the library by its whole path, and means the same when read.
  const RunResult dumped =
      run_program({"config", "--example", "--set", "trainer.loss.plugin=" + kLibrary, "--set",
                   "trainer.loss.preset=icepop+mine"});
  ASSERT_EQ(dumped.code, 0) << dumped;
  EXPECT_TRUE(contains(dumped.out, "plugin = \"" + kLibrary + "\"")) << dumped.out;
  EXPECT_TRUE(contains(dumped.out, "mine_high = 5")) << dumped.out;
  write_file_atomically(config, dumped.out);
  EXPECT_EQ(run_program({"config", config}).code, 0);
}

TEST(Plugin, ExplainListAndStrictKeysKnowIt) {
  const RunResult explained =
      run_program({"loss", "explain", "icepop+mine", "--plugin", kLibrary, "--set", "mine_high=2"});
  ASSERT_EQ(explained.code, 0) << explained;
  for (const char* words : {"mine = min(pi/rollout, mine_high), detached", "mine_high = 2"}) {
    EXPECT_TRUE(contains(explained.out, words)) << explained.out;
  }
  const RunResult listed = run_program({"loss", "list", "--plugin", kLibrary});
  EXPECT_TRUE(contains(listed.out, "+mine")) << listed;
  EXPECT_TRUE(contains(listed.out, "vanilla_pg")) << listed;
  const RunResult preset =
      run_program({"loss", "compare", "--plugin", kLibrary, "--preset", "vanilla_pg", "--preset",
                   "reinforce", "--batch", kBatch, "--json"});
  ASSERT_EQ(preset.code, 0) << preset;
  const Document compared = json_of(preset.out);
  EXPECT_EQ(compared["presets"][0]["loss"].GetDouble(), compared["presets"][1]["loss"].GetDouble());
  for (const auto& [setting, words] :
       std::vector<std::pair<std::string, std::string>>{{"mine_hig=2", "did you mean mine_high?"},
                                                        {"mine_high=0", "must be above 0"},
                                                        {"mine_high=no", "must be a number"}}) {
    const RunResult refused =
        run_program({"loss", "explain", "icepop+mine", "--plugin", kLibrary, "--set", setting});
    EXPECT_EQ(refused.code, 2) << refused;
    EXPECT_TRUE(contains(refused.err, words)) << refused;
  }
  const RunResult without = run_program({"loss", "explain", "icepop+mine"});
  EXPECT_EQ(without.code, 2);
  EXPECT_TRUE(contains(without.err, "there is no correction mine")) << without;
}

TEST(Plugin, ItsMetricsAreShownWhereverMetricsAre) {
  const RunResult explained = run_program({"loss", "explain", "icepop", "--plugin", kLibrary});
  EXPECT_TRUE(contains(explained.out, "plugin/risen")) << explained;
  EXPECT_TRUE(contains(explained.out, "share of trained tokens with pi > rollout")) << explained;
  EXPECT_FALSE(contains(run_program({"loss", "explain", "icepop"}).out, "plugin/"));
  const RunResult listed = run_program({"loss", "list", "--plugin", kLibrary});
  EXPECT_TRUE(contains(listed.out, "plugin/risen")) << listed;
  const RunResult eval =
      run_program({"loss", "eval", "--plugin", kLibrary, "--preset", "icepop", "--batch", kBatch});
  ASSERT_EQ(eval.code, 0) << eval;
  const Document evaluated = json_of(eval.out);
  const double risen = evaluated["metrics"]["plugin/risen"].GetDouble();
  // By hand from the batch: trained positions whose pi is above rollout.
  const Document batch = json_of(read_file(kBatch));
  double up = 0, all = 0;
  for (const auto& sequence : batch["sequences"].GetArray()) {
    for (unsigned t = 0; t < sequence["pi"].Size(); ++t) {
      if (sequence.HasMember("mask") && sequence["mask"][t].GetInt() == 0) continue;
      all += 1;
      up += sequence["pi"][t].GetDouble() > sequence["rollout"][t].GetDouble() ? 1 : 0;
    }
  }
  ASSERT_EQ(all, 16);
  EXPECT_NEAR(risen, up / all, 1e-12);
  const RunResult table = run_program({"loss", "compare", "--plugin", kLibrary, "--batch", kBatch});
  EXPECT_TRUE(contains(table.out, "plugin/risen " + fmt::format("{:.4g}", risen))) << table;
  const RunResult compared =
      run_program({"loss", "compare", "--plugin", kLibrary, "--batch", kBatch, "--json"});
  EXPECT_EQ(json_of(compared.out)["mismatch"]["plugin/risen"].GetDouble(), risen) << compared;
}

TEST(Plugin, ARunTrainsWithIt) {
  const TempFolder folder;
  const std::string run = folder / "run";
  const RunResult trained = run_program(
      {"train", "--set", "output_dir=" + run, "--set", "trainer.loss.plugin=" + kLibrary, "--set",
       "trainer.loss.preset=reinforce+mine", "--set", "trainer.max_steps=2", "--set",
       "sft.max_steps=5", "--set", "eval.prompts=8"},
      {.time_limit = std::chrono::seconds(300)});
  ASSERT_EQ(trained.code, 0) << trained;
  EXPECT_TRUE(contains(read_file(run + "/config.toml"), kLibrary));
  // Its metric is in every step, in the run's objective and in the report.
  const std::string metrics = read_file(run + "/metrics.jsonl");
  const Document first = json_of(metrics.substr(0, metrics.find('\n')));
  EXPECT_GE(first["plugin/risen"].GetDouble(), 0.0);
  EXPECT_LE(first["plugin/risen"].GetDouble(), 1.0);
  EXPECT_TRUE(contains(read_file(run + "/objective.txt"), "plugin/risen"));
  EXPECT_TRUE(contains(read_file(run + "/report.html"), "\"plugin/risen\""));
}

TEST(Plugin, WhatIsNoPluginOfThisVersionIsRefusedBeforeItIsCalled) {
  const TempFolder folder;
  const auto refused = [&](const std::string& file, const std::vector<std::string>& words) {
    const RunResult result = run_program({"loss", "list", "--plugin", file});
    EXPECT_EQ(result.code, 2) << result;
    for (const std::string& word : words) {
      EXPECT_TRUE(contains(result.err, word)) << word << " is not in " << result.err;
    }
  };
  refused(folder / "missing.so", {"missing.so", "cannot be loaded"});
  write_file_atomically(folder / "text.so", "no library");
  refused(folder / "text.so", {"text.so", "cannot be loaded"});
  refused("/lib/x86_64-linux-gnu/libm.so.6", {"is not a plugin of leeway"});
  // Another version, and another layout: the library's own words about itself, changed in its
  // bytes.
  const std::string bytes = read_file(kLibrary);
  PluginAbi abi = plugin_abi();
  const std::string_view whole(reinterpret_cast<const char*>(&abi), sizeof abi);
  const size_t place = bytes.find(whole);
  ASSERT_NE(place, std::string::npos);
  const auto changed = [&](const PluginAbi& other, const std::string& name) {
    std::string copy = bytes;
    copy.replace(place, sizeof other, reinterpret_cast<const char*>(&other), sizeof other);
    write_file_atomically(folder / name, copy);
    return folder / name;
  };
  PluginAbi old = abi;
  old.version[0] = '9';
  refused(changed(old, "old.so"), {"was built for leeway 9.1.0, this is leeway 0.1.0"});
  PluginAbi wide = abi;
  wide.spec_size += 8;
  refused(changed(wide, "wide.so"), {"laid out differently", "same compiler"});
  PluginAbi other = abi;
  other.mark[0] = 'x';
  refused(changed(other, "other.so"), {"another kind"});
}

TEST(Plugin, ItsVersionIsTheProgramsOwn) {
  EXPECT_TRUE(contains(read_file(LEEWAY_SOURCE_DIR "/CMakeLists.txt"),
                       std::string("project(leeway VERSION ") + kPluginVersion));
}

}  // namespace
}  // namespace leeway
