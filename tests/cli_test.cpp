// The program end to end: list, explain, eval, config, and behaviour that all commands share.

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <map>
#include <regex>

#include "cli_helpers.h"

namespace leeway {
namespace {

TEST(LossList, PrintsOneLineForEachPresetWithItsOrigin) {
  const RunResult result = run_program({"loss", "list"});
  expect_quiet_success(result);
  const std::vector<std::string> lines = lines_of(result.out);
  auto count_lines = [&](const std::string& name) {
    size_t count = 0;
    for (const std::string& line : lines) {
      count += line.starts_with("  " + name + " ") && line.ends_with("]") && contains(line, "[");
    }
    return count;
  };
  for (const std::string& name : names().native) EXPECT_EQ(count_lines(name), 1u) << name;
  for (const std::string& name : names().corrections)
    EXPECT_EQ(count_lines("+" + name), 1u) << name;
  for (const std::string& name : names().foreign) EXPECT_EQ(count_lines(name), 1u) << name;
}

TEST(LossList, HasThePresetsKeysAndDefaultsOfTheContract) {
  using Keys = std::map<std::string, std::string>;
  const std::map<std::string, Keys> presets = {
      {"icepop",
       {{"icepop_ratio_low", "0.2"},
        {"icepop_ratio_high", "5"},
        {"icepop_rollout_min_ratio", "off"}}},
      {"ipo_kl", {{"ipo_ratio_low", "0.2"}, {"ipo_ratio_high", "5"}, {"kl_tau", "1e-3"}}},
      {"dppo_tv", {{"dppo_diff_low", "0.2"}, {"dppo_diff_high", "0.2"}}},
      {"dppo_kl", {{"dppo_diff_low", "0.2"}, {"dppo_diff_high", "0.2"}, {"kl_tau", "1e-3"}}},
      {"reinforce", {}},
      {"is", {{"log_clamp", "off"}}},
      {"ppo", {{"eps_low", "0.2"}, {"eps_high", "0.2"}, {"dual_clip", "off"}, {"anchor", "prox"}}},
      {"grpo",
       {{"eps_low", "0.2"},
        {"eps_high", "0.2"},
        {"dual_clip", "off"},
        {"anchor", "prox"},
        {"ref_kl", "0"}}},
      {"dapo",
       {{"eps_low", "0.2"}, {"eps_high", "0.28"}, {"dual_clip", "off"}, {"anchor", "prox"}}},
      {"gspo",
       {{"eps_low", "0.2"},
        {"eps_high", "0.2"},
        {"log_cap", "10"},
        {"gradient", "straight_through"},
        {"anchor", "prox"}}},
      {"cispo", {{"ratio_low", "0"}, {"ratio_high", "5"}, {"anchor", "rollout"}}},
      {"cispo_mask", {{"eps_low", "0.2"}, {"eps_high", "0.28"}, {"anchor", "prox"}}},
      {"dro", {{"dro_beta", "0.05"}, {"anchor", "prox"}}},
      {"sapo", {{"tau_pos", "1"}, {"tau_neg", "1.05"}, {"anchor", "prox"}}},
      {"kpop", {{"kpop_threshold", "0.1"}}},
      {"geo_mask", {{"geo_ratio_low", "0.99"}, {"geo_ratio_high", "1.01"}}},
      {"seq_mis", {{"seq_ratio_high", "3"}}},
      {"m2po", {{"m2_threshold", "0.04"}}}};
  const std::map<std::string, Keys> corrections = {
      {"tis", {{"tis_cap", "5"}, {"tis_level", "token"}}},
      {"icepop_tis", {{"tis_ratio_low", "0.5"}, {"tis_ratio_high", "2"}}},
      {"off_policy_is", {{"ois_ratio_low", "0"}, {"ois_ratio_high", "2"}}}};
  const RunResult result = run_program({"loss", "list", "--json"});
  expect_quiet_success(result);
  const Document list = json_of(result.out);
  auto same = [](const std::string& a, const std::string& b) {
    char *end_a = nullptr, *end_b = nullptr;
    const double x = std::strtod(a.c_str(), &end_a), y = std::strtod(b.c_str(), &end_b);
    return *end_a == '\0' && *end_b == '\0' ? x == y : a == b;
  };
  auto compare = [&](const char* kind, const std::map<std::string, Keys>& expected) {
    std::map<std::string, Keys> found;
    for (const Json& entry : list[kind].GetArray()) {
      EXPECT_GT(entry["summary"].GetStringLength(), 0u);
      EXPECT_GT(entry["origin"].GetStringLength(), 0u);
      Keys& keys = found[entry["name"].GetString()];
      for (const auto& key : entry["keys"].GetObject()) {
        keys[key.name.GetString()] = key.value.GetString();
      }
    }
    for (const auto& [name, keys] : expected) {
      ASSERT_TRUE(found.contains(name)) << name;
      for (const auto& [key, value] : keys) {
        ASSERT_TRUE(found[name].contains(key)) << name << " " << key;
        EXPECT_TRUE(same(found[name][key], value)) << name << " " << key << found[name][key];
      }
    }
  };
  compare("presets", presets);
  compare("corrections", corrections);
}

// ---------------------------------------------------------------------------------------------

void expect_explained(const std::string& preset) {
  SCOPED_TRACE(preset);
  const RunResult text = run_program({"loss", "explain", preset});
  expect_quiet_success(text);
  EXPECT_TRUE(text.out.starts_with(preset + "\n")) << text.out;
  for (const char* section :
       {"\nobjective", "\ndropped", "\ngradient", "\ndenominator", "\nreads"}) {
    EXPECT_TRUE(contains(text.out, section)) << section << " is missing in " << text.out;
  }
  EXPECT_FALSE(contains(text.out, "nan")) << text.out;
  const RunResult json = run_program({"loss", "explain", preset, "--json"});
  expect_quiet_success(json);
  const Document document = json_of(json.out);
  EXPECT_EQ(document["preset"].GetString(), preset);
  for (const char* list : {"objective", "dropped", "gradient", "denominator", "reads"}) {
    EXPECT_FALSE(document[list].Empty()) << list;
  }
  EXPECT_TRUE(has(strings_of(document["reads"]), "pi"));
}

// As Hydra and other trainers take them.
TEST(CommandLine, SaysHowSettingsAndTheConfigurationAreGiven) {
  expect_mistake(run_program({"train", "run.toml", "trainer.max_steps=3"}),
                 {"--set trainer.max_steps=3"});
  expect_mistake(run_program({"train", "run.toml", "--trainer.max_steps", "3"}),
                 {"--set trainer.max_steps=3"});
  expect_mistake(run_program({"train", "--config", "run.toml"}), {"named without an option"});
  EXPECT_FALSE(contains(run_program({"train", "a.toml", "b.toml"}).err, "--set"));
}

TEST(LossExplain, ExplainsEveryNativePreset) {
  ASSERT_GE(names().native.size(), 18u);
  for (const std::string& preset : names().native) expect_explained(preset);
}

TEST(LossExplain, ExplainsEveryComposedPreset) {
  ASSERT_GE(composed_presets().size(), 18u * 9u);
  for (const std::string& preset : composed_presets()) expect_explained(preset);
}

TEST(LossExplain, ExplainsEveryForeignPreset) {
  ASSERT_GE(names().foreign.size(), 60u);
  for (const std::string& preset : names().foreign) expect_explained(preset);
}

TEST(LossExplain, ShowsTheNumbersThatWereSet) {
  const RunResult result = run_program({"loss", "explain", "grpo+tis", "--set", "eps_high=0.375",
                                        "--set", "tis_cap=7.5", "--set", "anchor=rollout"});
  expect_quiet_success(result);
  EXPECT_TRUE(contains(result.out, "1.375")) << result.out;
  EXPECT_TRUE(contains(result.out, "eps_high = 0.375")) << result.out;
  EXPECT_TRUE(contains(result.out, "7.5")) << result.out;
  EXPECT_TRUE(contains(result.out, "pi/rollout")) << result.out;
}

TEST(LossExplain, ABareOffPolicyIsStandsOnReinforce) {
  const Document bare = json_of(run_program({"loss", "explain", "off_policy_is", "--json"}).out);
  const Document whole =
      json_of(run_program({"loss", "explain", "reinforce+off_policy_is", "--json"}).out);
  EXPECT_EQ(text_of(bare["objective"]), text_of(whole["objective"]));
}

// `eval` requires exactly the streams that `explain` lists under "reads".
void expect_reads_what_it_names(const std::string& preset) {
  SCOPED_TRACE(preset);
  const Document explained = json_of(run_program({"loss", "explain", preset, "--json"}).out);
  const std::vector<std::string> reads = strings_of(explained["reads"]);
  std::set<std::string> unread;
  for (const std::string& stream : kStreams) {
    if (!has(reads, stream)) unread.insert(stream);
  }
  expect_quiet_success(eval(preset, batch_without(unread)));
  for (const std::string& stream : reads) {
    if (stream == "pi") continue;
    expect_mistake(eval(preset, batch_without({stream})), {preset, "\"" + stream + "\""});
  }
}

TEST(LossEval, ReadsTheStreamsThatExplainNamesAndNoOther) {
  for (const std::string& preset : names().native) expect_reads_what_it_names(preset);
  for (const std::string& preset : names().foreign) expect_reads_what_it_names(preset);
  for (const char* preset : {"grpo+tis", "icepop+off_policy_is", "reinforce+icepop_tis"}) {
    expect_reads_what_it_names(preset);
  }
}

TEST(LossEval, GivesLossGradientAndMetricsOfAHandComputedCase) {
  const RunResult result = eval("icepop", kBatch, {"icepop_ratio_low=0.7"});
  expect_quiet_success(result);
  const Document json = json_of(result.out);
  // Four trained tokens; the last one's ratio, e^-0.5, is below the band.
  const double a = std::exp(0.1), b = std::exp(-0.1), c = std::exp(0.05);
  EXPECT_NEAR(json["loss"].GetDouble(), (-a - b + 0.5 * c) / 4, 1e-12);
  ASSERT_EQ(json["grad"].Size(), 2u);
  ASSERT_EQ(json["grad"][0].Size(), 3u);
  ASSERT_EQ(json["grad"][1].Size(), 2u);
  EXPECT_NEAR(json["grad"][0][0].GetDouble(), -a / 4, 1e-12);
  EXPECT_NEAR(json["grad"][0][1].GetDouble(), -b / 4, 1e-12);
  EXPECT_EQ(json["grad"][0][2].GetDouble(), 0.0);
  EXPECT_NEAR(json["grad"][1][0].GetDouble(), 0.5 * c / 4, 1e-12);
  EXPECT_EQ(json["grad"][1][1].GetDouble(), 0.0);
  EXPECT_EQ(json["metrics"]["tokens"].GetDouble(), 4);
  EXPECT_EQ(json["metrics"]["is_masked"].GetDouble(), 0.25);
}

TEST(LossEval, EvaluatesEveryPresetIntoStrictJson) {
  std::vector<std::string> all = names().native;
  all.insert(all.end(), names().foreign.begin(), names().foreign.end());
  for (const std::string& preset : composed_presets()) all.push_back(preset);
  for (const std::string& preset : all) {
    SCOPED_TRACE(preset);
    const RunResult result = eval(preset, kBatch);
    expect_quiet_success(result);
    const Document json = json_of(result.out);
    EXPECT_TRUE(json["loss"].IsNumber());
    EXPECT_TRUE(json["metrics"].IsObject());
    ASSERT_EQ(json["grad"].Size(), 2u);
    for (const Json& row : json["grad"].GetArray()) {
      for (const Json& value : row.GetArray()) EXPECT_TRUE(value.IsNumber());
    }
  }
}

TEST(LossEval, GivesTheSameFromAConfigAsFromThePreset) {
  const TempFolder folder;
  const std::string batch = folder.write("batch.json", kBatch);
  const std::string config = folder.write(
      "run.toml", "[trainer.loss]\npreset = \"grpo+tis\"\neps_high = 0.28\ntis_cap = 1\n");
  const RunResult by_config = run_program({"loss", "eval", "--config", config, "--batch", batch});
  expect_quiet_success(by_config);
  const RunResult by_preset = eval("grpo+tis", kBatch, {"eps_high=0.28", "tis_cap=1"});
  EXPECT_EQ(by_config.out, by_preset.out);
}

TEST(LossEval, LooksAtTheLossTableOfAConfigAlone) {
  const TempFolder folder;
  const std::string batch = folder.write("batch.json", kBatch);
  const std::string config = folder.write("run.toml",
                                          "output_dir = \"runs/x\"\n[trainer]\nsteps = 5\n"
                                          "[trainer.loss]\npreset = \"ppo\"\n[orchestrator]\n");
  const RunResult result = run_program({"loss", "eval", "--config", config, "--batch", batch});
  expect_quiet_success(result);
  EXPECT_EQ(result.out, eval("ppo", kBatch).out);
}

TEST(LossEval, TakesIcepopWhereALossTableNamesNoPreset) {
  const TempFolder folder;
  const std::string batch = folder.write("batch.json", kBatch);
  const std::string config = folder.write("run.toml", "[trainer.loss]\n");
  const RunResult result = run_program({"loss", "eval", "--config", config, "--batch", batch});
  expect_quiet_success(result);
  EXPECT_TRUE(result.out == eval("icepop", kBatch).out) << result.out;
  const std::string none = folder.write("none.toml", "[trainer]\n");
  expect_mistake(run_program({"loss", "eval", "--config", none, "--batch", batch}),
                 {none, "[trainer.loss]"});
}

TEST(LossEval, LetsSetFollowAConfig) {
  const TempFolder folder;
  const std::string batch = folder.write("batch.json", kBatch);
  const std::string config =
      folder.write("run.toml", "[trainer.loss]\npreset = \"ppo\"\neps_high = 0.5\n");
  const RunResult result =
      run_program({"loss", "eval", "--config", config, "--batch", batch, "--set", "eps_high=0.01",
                   "--set", "trainer.loss.anchor=rollout"});
  expect_quiet_success(result);
  EXPECT_EQ(result.out, eval("ppo", kBatch, {"eps_high=0.01", "anchor=rollout"}).out);
  EXPECT_NE(result.out, eval("ppo", kBatch, {"eps_high=0.5", "anchor=rollout"}).out);
}

TEST(LossEval, TakesTomlValuesAndBareStringsInSet) {
  const std::string plain = eval("ppo", kBatch, {"anchor=rollout", "eps_low=1"}).out;
  EXPECT_FALSE(plain.empty());
  EXPECT_EQ(eval("ppo", kBatch, {"anchor=\"rollout\"", "eps_low=1.0"}).out, plain);
  EXPECT_EQ(eval("ppo", kBatch, {"anchor = 'rollout'", " eps_low = 10e-1 "}).out, plain);
  EXPECT_EQ(eval("ppo", kBatch, {"anchor=rollout", "eps_low=1", "dual_clip=off"}).out, plain);
}

TEST(LossEval, ListsTheInertKeysOfAForeignPreset) {
  const RunResult result =
      eval("verl/vanilla", kBatch, {"clip_ratio=0.3", "no_such_key=1", "another=text"});
  expect_quiet_success(result);
  const std::vector<std::string> inert = strings_of(json_of(result.out)["inert"]);
  EXPECT_TRUE(has(inert, "no_such_key"));
  EXPECT_TRUE(has(inert, "another"));
  EXPECT_FALSE(has(inert, "clip_ratio"));
}

TEST(LossEval, DoesNotLetGroupsRolloutsAndVersionsTouchATokenLevelLoss) {
  Document batch = json_of(kBatch);
  int number = 0;
  for (Json& sequence : batch["sequences"].GetArray()) {
    auto& memory = batch.GetAllocator();
    sequence.AddMember("group", "the same", memory);
    sequence.AddMember("rollout_id", ++number, memory);
    Json versions(rapidjson::kArrayType);
    for (size_t t = 0; t < sequence["pi"].Size(); ++t) versions.PushBack(number, memory);
    sequence.AddMember("versions", versions, memory);
  }
  const RunResult result = eval("icepop", text_of(batch));
  expect_quiet_success(result);
  const Document labelled = json_of(result.out), plain = json_of(eval("icepop", kBatch).out);
  EXPECT_EQ(text_of(labelled["loss"]), text_of(plain["loss"]));
  EXPECT_EQ(text_of(labelled["grad"]), text_of(plain["grad"]));
  EXPECT_EQ(labelled["metrics"]["version_max"].GetDouble(), 2);
}

TEST(LossEval, RefusesASetOfThePresetThatItWouldIgnore) {
  expect_mistake(eval("icepop", kBatch, {"preset=grpo"}), {"--set", "preset", "grpo"});
  expect_mistake(run_program({"loss", "explain", "icepop", "--set", "preset=grpo"}),
                 {"--set", "preset", "grpo"});
}

TEST(LossEval, AsksForOneOfPresetAndConfig) {
  expect_mistake(run_program({"loss", "eval", "--batch", "x.json"}), {"--preset", "--config"});
  expect_mistake(
      run_program({"loss", "eval", "--preset", "is", "--config", "x.toml", "--batch", "x.json"}),
      {"--preset", "--config"});
}

// ---------------------------------------------------------------------------------------------

TEST(ConfigCommand, SaysWhereEachValueCameFrom) {
  const TempFolder folder;
  const std::string file =
      folder.write("run.toml", "# a comment\n[trainer.loss]\npreset = \"dapo\"\n\neps_low = 0.1\n");
  const RunResult text = run_program({"config", file, "--set", "trainer.loss.eps_high=0.4"});
  expect_quiet_success(text);
  const RunResult result =
      run_program({"config", file, "--json", "--set", "trainer.loss.eps_high=0.4"});
  expect_quiet_success(result);
  const Document json = json_of(result.out);
  const std::vector<std::vector<std::string>> expected = {
      {"preset", "\"dapo\"", file + " line 3"},
      {"eps_low", "0.1", file + " line 5"},
      {"eps_high", "0.4", "--set"},
      {"dual_clip", "\"off\"", "default"},
      {"anchor", "\"prox\"", "default"},
      {"reduction", "\"token_mean\"", "default"}};
  for (const auto& row : expected) {
    const std::string key = "trainer.loss." + row[0];
    ASSERT_TRUE(json.HasMember(key.c_str())) << key;
    EXPECT_EQ(json[key.c_str()]["value"].GetString(), row[1]);
    EXPECT_EQ(json[key.c_str()]["origin"].GetString(), row[2]);
    bool shown = false;
    for (const std::string& line : lines_of(text.out)) {
      shown |= line.starts_with(row[0] + " = " + row[1] + " ") && line.ends_with("# " + row[2]);
    }
    EXPECT_TRUE(shown) << key << "\n" << text.out;
  }
}

TEST(Settings, SeveralMayFollowOneSet) {
  const RunResult both = run_program(
      {"loss", "explain", "icepop", "--set", "icepop_ratio_low=0.3", "icepop_ratio_high=3"});
  EXPECT_EQ(both.code, 0) << both;
  EXPECT_TRUE(contains(both.out, "0.3 <= pi/rollout <= 3")) << both;
  const RunResult after =
      run_program({"loss", "explain", "--set", "icepop_ratio_low=0.3", "icepop"});
  EXPECT_EQ(after.code, 0) << after;
  EXPECT_TRUE(contains(after.out, "0.3 <= pi/rollout <= 5")) << after;
}

TEST(ConfigCommand, TakesItsFileAfterSetToo) {
  const TempFolder folder;
  const std::string file = folder.write("run.toml", "[trainer.loss]\npreset = \"dapo\"\n");
  const RunResult result = run_program({"config", "--set", "trainer.loss.eps_high=0.4", file});
  expect_quiet_success(result);
  EXPECT_EQ(result.out, run_program({"config", file, "--set", "trainer.loss.eps_high=0.4"}).out);
}

// The effective configuration, read again, gives exactly the same loss.
void expect_same_meaning(const std::string& table) {
  SCOPED_TRACE(table);
  const TempFolder folder;
  const std::string batch = folder.write("batch.json", kBatch);
  auto loss = [&](const std::string& file) {
    return run_program({"loss", "eval", "--config", file, "--batch", batch}).out;
  };
  const std::string given = folder.write("given.toml", "[trainer.loss]\n" + table + "\n");
  const RunResult printed = run_program({"config", given});
  expect_quiet_success(printed);
  const std::string effective = folder.write("effective.toml", printed.out);
  const RunResult again = run_program({"config", effective});
  EXPECT_EQ(again.code, 0) << again << "\n" << printed.out;
  EXPECT_TRUE(loss(effective) == loss(given)) << printed.out;
}

TEST(ConfigCommand, PrintsAConfigurationThatMeansTheSame) {
  expect_same_meaning("preset = \"icepop\"");
  expect_same_meaning("preset = \"cispo\"\nratio_high = 3");
  expect_same_meaning("preset = \"cispo\"\neps_low = 0.2\neps_high = 0.3");
  expect_same_meaning("preset = \"verl/vanilla\"\nclip_ratio = 0.25\nunknown = true");
  expect_same_meaning("preset = \"grpo+tis\"\nreduction = \"fixed_length\"\nfixed_length = 8");
}

TEST(ConfigCommand, PrintsEveryDigitOfANumber) {
  expect_same_meaning("preset = \"icepop\"\nadv_tau = 0.1234567891");
}

TEST(ConfigCommand, PrintsAnInfinityAsTomlDoes) {
  expect_same_meaning("preset = \"icepop\"\nicepop_ratio_high = inf");
}

TEST(ConfigCommand, PrintsQuotesInsideTextAsTomlDoes) {
  expect_same_meaning("preset = \"verl/vanilla\"\nnote = 'a \"quoted\" \\ word'");
}

TEST(ConfigCommand, PrintsAnExampleThatIsItselfAConfiguration) {
  const RunResult example = run_program({"config", "--example"});
  expect_quiet_success(example);
  const TempFolder folder;
  const RunResult again = run_program({"config", folder.write("example.toml", example.out)});
  expect_quiet_success(again);
  EXPECT_TRUE(contains(again.out, "preset = \"icepop\"")) << again.out;
  expect_mistake(run_program({"config"}), {"TOML", "--example"});
  expect_mistake(run_program({"config", "x.toml", "--example"}), {"--example"});
}

// ---------------------------------------------------------------------------------------------

TEST(Program, HasHelpForEveryCommand) {
  const std::vector<std::vector<std::string>> commands = {{},
                                                          {"loss"},
                                                          {"loss", "list"},
                                                          {"loss", "explain"},
                                                          {"loss", "eval"},
                                                          {"loss", "check"},
                                                          {"loss", "compare"},
                                                          {"config"}};
  for (std::vector<std::string> command : commands) {
    std::string name = "leeway";
    for (const std::string& word : command) name += " " + word;
    SCOPED_TRACE(name);
    command.push_back("--help");
    const RunResult result = run_program(command);
    expect_quiet_success(result);
    EXPECT_TRUE(contains(result.out, "Usage: " + name)) << result.out;
    EXPECT_GT(lines_of(result.out).front().size(), 20u) << "it says what the command is for";
    // Every option has a description.
    for (const std::string& line : lines_of(result.out)) {
      if (!line.starts_with("  ") || line.starts_with("   ") || line.size() >= 32) continue;
      EXPECT_TRUE(contains(result.out, line + "\n                              ")) << line;
    }
  }
}

TEST(Program, PrintsItsVersionOnStdout) {
  const RunResult result = run_program({"--version"});
  expect_quiet_success(result);
  // The version, the commit, and what it was built with: "leeway 0.1.0 (c2f03e7-dirty)".
  const std::vector<std::string> lines = lines_of(result.out);
  ASSERT_EQ(lines.size(), 2u) << result.out;
  const std::regex first("leeway [0-9]+\\.[0-9]+\\.[0-9]+ \\((unknown|[0-9a-f]{7,40}(-dirty)?)\\)");
  EXPECT_TRUE(std::regex_match(lines[0], first)) << result.out;
  EXPECT_TRUE(lines[1].starts_with("built with ")) << result.out;
}

// The script that looks the commit up, on a repository of its own.
TEST(Program, KnowsItsCommitAndWhetherFilesDiffer) {
  const TempFolder folder;
  const std::string sources = folder / "sources", header = folder / "commit.h";
  const auto sh = [&](const std::string& command) {
    const RunResult result = run_program({"-c", command}, {.program = "sh"});
    EXPECT_EQ(result.code, 0) << command << "\n" << result;
    return result.out;
  };
  const auto commit_of = [&](const std::string& where) {
    sh("cmake -DSOURCE=" + where + " -DOUTPUT=" + header +
       " -P " LEEWAY_SOURCE_DIR "/cmake/commit.cmake");
    std::ifstream file(header);
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    const size_t start = text.find('"') + 1;
    return text.substr(start, text.rfind('"') - start);
  };
  sh("mkdir -p " + sources + "/inner");
  EXPECT_EQ(commit_of(sources), "unknown") << "no repository";
  sh("cd " + sources + " && git init -q && echo one > file && git add file && " +
     "git -c user.name=a -c user.email=a@b commit -qm one");
  const std::string hash = sh("git -C " + sources + " rev-parse --short=7 HEAD").substr(0, 7);
  EXPECT_EQ(commit_of(sources), hash);
  const auto written = std::filesystem::last_write_time(header);
  EXPECT_EQ(commit_of(sources), hash);
  EXPECT_EQ(std::filesystem::last_write_time(header), written) << "nothing is compiled anew";
  sh("echo two > " + sources + "/file");
  EXPECT_EQ(commit_of(sources), hash + "-dirty");
  EXPECT_EQ(commit_of(sources + "/inner"), "unknown") << "the commit of another project";
}

TEST(Program, NamesTheCommandOrOptionItDoesNotKnow) {
  expect_mistake(run_program({}), {"subcommand", "--help"});
  expect_mistake(run_program({"loss"}), {"subcommand", "--help"});
  expect_mistake(run_program({"frobnicate"}), {"frobnicate", "--help"});
  expect_mistake(run_program({"loss", "frobnicate"}), {"frobnicate", "--help"});
  expect_mistake(run_program({"loss", "list", "--frobnicate"}), {"--frobnicate", "--help"});
  expect_mistake(run_program({"loss", "list", "frobnicate"}), {"frobnicate", "--help"});
}

TEST(Program, ReportsAResultThatCannotBeWritten) {
  if (!std::filesystem::exists("/dev/full")) GTEST_SKIP() << "there is no /dev/full here";
  for (const std::vector<std::string>& args :
       std::vector<std::vector<std::string>>{{"loss", "list"},
                                             {"loss", "explain", "icepop"},
                                             {"loss", "check", kGolden, "--json"},
                                             {"loss", "compare", "--preset", "icepop"},
                                             {"config", "--example"}}) {
    const RunResult result = run_program(args, {.stdout_file = "/dev/full"});
    EXPECT_EQ(result.code, 2) << args[0] << " " << args[1] << "\n" << result;
    EXPECT_TRUE(contains(result.err, "stdout")) << result.err;
  }
}

TEST(Program, KeepsItsExitCodeWhereStderrCannotBeWritten) {
  if (!std::filesystem::exists("/dev/full")) GTEST_SKIP() << "there is no /dev/full here";
  const RunOptions full{.stderr_file = "/dev/full"};
  EXPECT_EQ(run_program({"loss", "explain", "nosuch"}, full).code, 2);
  EXPECT_EQ(run_program({"loss", "compare", "--preset", "icepop"}, full).code, 0);
  EXPECT_EQ(run_program({"loss", "frobnicate"}, full).code, 2);
}

}  // namespace
}  // namespace leeway
