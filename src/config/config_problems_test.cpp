// Reporting all problems of a configuration at once, what --unset and --set remove from a file, and
// how input paths are resolved.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <fstream>

#include "base/test_folder.h"
#include "config/sweep_config.h"
#include "config/test_support.h"

namespace leeway {
namespace {

std::vector<std::string> problems_of(const std::string& text,
                                     const std::vector<std::string>& sets = {},
                                     const std::vector<std::string>& unsets = {}) {
  try {
    parse_config(catalog, "run.toml", text, sets, ConfigScope::whole, unsets);
  } catch (const ConfigError& error) {
    return error.problems;
  }
  return {};
}

Config parse_without(const std::string& text, const std::vector<std::string>& unsets,
                     const std::vector<std::string>& sets = {}) {
  return parse_config(catalog, "run.toml", text, sets, ConfigScope::whole, unsets);
}

void expect_lines(const std::vector<std::string>& problems,
                  const std::vector<std::vector<std::string>>& words) {
  std::string all;
  for (const std::string& problem : problems) all += problem + "\n";
  ASSERT_EQ(problems.size(), words.size()) << all;
  for (size_t i = 0; i < words.size(); ++i) expect_words(problems[i], words[i]);
}

TEST(Problems, AreAllReportedInTheOrderOfTheFile) {
  const std::string text =
      "sead = 3\n"                         // 1: unknown
      "[trainer]\n"                        //
      "max_steps = \"many\"\n"             // 3: wrong type
      "optimizer_steps = \"minibatch\"\n"  // 4: without effect
      "[rollout]\n"                        //
      "top_p = 1.5\n"                      // 6: out of range
      "temperature = [1]\n"                // 7: a list
      "[trainer.loss]\n"                   //
      "preset = \"icepop\"\n"              //
      "eps_low = 0.1\n"                    // 10: of another preset
      "icepop_ratio_low = -1\n"            // 11: out of range
      "[[environment]]\n"                  // 12: no name
      "[[environment]]\n"                  //
      "name = \"sort\"\n"                  //
      "min_length = 9\n"                   // 15: above max_length
      "data = \"d\"\n"                     // 16: of another environment
      "[checkpoints]\n";                   // 17: unknown table
  expect_lines(problems_of(text, {"trainer.epochs=0", "foo"}),
               {{"run.toml line 1: sead = 3", "seed"},
                {"line 3: trainer.max_steps = \"many\"", "an integer"},
                {"line 4: trainer.optimizer_steps", "inert"},
                {"line 6: rollout.top_p = 1.5", "0 to 1"},
                {"line 7: rollout.temperature = a list", "finite number"},
                {"line 10: trainer.loss.eps_low = 0.1", "belongs to"},
                {"line 11: trainer.loss.icepop_ratio_low = -1", "at least"},
                {"line 12: environment.0 has no name"},
                {"line 15: environment.1.min_length = 9", "environment.1.max_length (8)"},
                {"line 16: environment.1.data", "is a key of environment jsonl"},
                {"line 17: checkpoints", "did you mean checkpoint?"},
                {"--set trainer.epochs = 0", "1 to 1000"},
                {"--set foo", "no \"=\"", "key=value"}});
  const std::string message = error_of(text);
  expect_words(message, {"has 11 problems:\n  run.toml line 1", "\n  run.toml line 17"});
}

TEST(Problems, OneIsSaidWithoutACount) {
  EXPECT_TRUE(error_of("seed = -1\n").starts_with("run.toml line 1: seed = -1: must be"));
}

// A refused value keeps its default in the meantime, which must not cause problems for other keys.
TEST(Problems, OfAValueDoNotMakeOthers) {
  expect_lines(problems_of(kSort + "min_length = 9\nmax_length = \"x\"\n"), {{"line 4"}});
  expect_lines(problems_of("[trainer]\nfinal_rate = 0.1\nschedule = \"lineal\"\n"), {{"line 3"}});
  expect_lines(problems_of("[trainer]\nteacher = \"t\"\n[trainer.loss]\nteacher_tau = \"x\"\n"),
               {{"line 4"}});
  expect_lines(problems_of("[[environment]]\nname = 3\nmin_length = 5\n"), {{"line 2"}});
  expect_lines(problems_of("environment = [3]\n"), {{"line 1", "must be a table"}});
}

TEST(Problems, BeyondTheFirstFewAreCounted) {
  std::string text;
  constexpr int kMany = 200'000;
  for (const char* table : {"", "[trainer]\n", "[trainer.loss]\n"}) {
    text = table;
    for (int i = 0; i < kMany; ++i) text += fmt::format("k{} = 1\n", i);
    const std::string message = error_of(text);
    expect_words(message, {"has 200000 problems", "k0 = 1", "k19 = 1", "and 199980 more"});
    EXPECT_LT(message.size(), 20'000u);
  }
}

TEST(Problems, OfASweepAndItsRowsAreAllReported) {
  try {
    parse_sweep("sweep.toml",
                "bas = \"b\"\noutput_dir = 3\nseeds = [1, -2]\n[[table]]\nname = \"a/b\"\n"
                "[[table.row]]\nname = \"r\"\nset = [1, \"seed=3\", \"x=1\", \"y\"]\n");
    FAIL();
  } catch (const ConfigError& error) {
    expect_lines(error.problems, {{"base is missing"},
                                  {"line 1: bas", "did you mean base?"},
                                  {"line 2: output_dir = 3"},
                                  {"line 3: seeds", "-2 in the list must be 0 to"},
                                  {"line 5: table.name"},
                                  {"line 8", "1 in the list is not a string"},
                                  {"line 8", "seed=3", "leave it out"},
                                  {"line 8", "--set y", "no \"=\""}});
  }
  SweepProblems problems;
  const SweepTable table{"t", "t", {"trainer.epochs=0"}, {}};
  for (const char* name : {"a", "b"}) {
    const SweepRow row{name, name, {"trainer.epoch=2"}, "sweep.toml line 9"};
    try {
      sweep_run_config(catalog, table, row, 1, "base.toml", "[eval]\nprompts = 0\n");
      FAIL();
    } catch (const ConfigError& error) {
      problems.add(error);
    }
  }
  try {
    problems.throw_if_any();
    FAIL();
  } catch (const ConfigError& error) {
    expect_lines(error.problems, {{"base.toml line 2: eval.prompts = 0"},
                                  {"sweep.toml line 9: table t, row a: --set trainer.epochs = 0"},
                                  {"row a: --set trainer.epoch = 2"},
                                  {"row b: --set trainer.epochs = 0"},
                                  {"row b: --set trainer.epoch = 2"}});
  }
}

const std::string kThree =
    "seed = 3\n[sft]\nmax_steps = 5\n[trainer.loss]\npreset = \"ppo\"\neps_low = 0.1\n" + kSort +
    "max_length = 9\n[[environment]]\nname = \"arithmetic\"\n" + kSort + "id = \"other\"\n";

TEST(Unset, TakesKeysAndTablesOutOfTheFile) {
  EXPECT_FALSE(parse_without(kThree, {"sft"}).run.sft.enabled);
  EXPECT_EQ(parse_without(kThree, {"sft.max_steps"}).run.sft.max_steps, SftTable().max_steps);
  EXPECT_TRUE(parse_without(kThree, {"sft.max_steps"}).run.sft.enabled);
  EXPECT_EQ(parse_without(kThree, {"seed"}).run.seed, 1);
  EXPECT_EQ(parse_without(kThree, {"trainer.loss"}).preset, "icepop");
  EXPECT_EQ(parse_without(kThree, {"trainer"}).preset, "icepop");
  EXPECT_EQ(parse_without(kThree, {"environment.0.max_length"}).run.environments[0].max_length, 8);
  EXPECT_TRUE(parse_without(kThree, {"environment"}).run.environments.empty());
  // --unset uses the numbers of the file; --set numbers what is left.
  const Config config =
      parse_without(kThree, {"environment.0", "environment.1"}, {"environment.min_length=2"});
  ASSERT_EQ(config.run.environments.size(), 1u);
  EXPECT_EQ(config.run.environments[0].id, "other");
  EXPECT_EQ(config.run.environments[0].min_length, 2);
  EXPECT_EQ(origin_of(config, "seed"), "run.toml line 1");
  // Invalid keys can be removed too.
  EXPECT_EQ(parse_without("sead = 3\n[nonsense]\nx = 1\n", {"sead", "nonsense"}).run.seed, 1);
}

TEST(Unset, OfWhatIsNotThereNamesTheNearest) {
  expect_lines(
      problems_of(kThree, {}, {"sftt", "trainer.loss.eps_lo", "environment.7", "zzzzzzzz"}),
      {{"--unset sftt: run.toml has no such key or table", "did you mean sft?"},
       {"--unset trainer.loss.eps_lo", "trainer.loss.eps_low?"},
       {"--unset environment.7", "did you mean environment.0?"},
       {"--unset zzzzzzzz", "it has environment, seed, sft, trainer"}});
  expect_words(problems_of("", {}, {"sft"}).at(0), {"--unset sft", "it is empty"});
  expect_words(problems_of(kThree, {}, {"environment.weight"}).at(0), {"no such key"});
}

TEST(Unset, OfTheLossAloneNeedsNoPath) {
  const Config config = parse_config(catalog, "a", kThree, {}, ConfigScope::loss_only, {"eps_low"});
  EXPECT_EQ(config.loss.size(), 1u);
}

TEST(TakenAlong, AreKeysOfTheFileThatTheCommandLineLeavesWithoutEffect) {
  struct Case {
    std::string text;
    std::vector<std::string> sets, unsets, note, gone;
  };
  const std::vector<Case> cases = {
      {"[trainer.loss]\npreset = \"icepop\"\nicepop_ratio_low = 0.3\nicepop_ratio_high = 4\n",
       {"trainer.loss.preset=ppo"},
       {},
       {"--set trainer.loss.preset = \"ppo\"",
        "trainer.loss.icepop_ratio_low = 0.3 (run.toml line 3)",
        "trainer.loss.icepop_ratio_high = 4 (run.toml line 4)"},
       {"trainer.loss.icepop_ratio_low", "trainer.loss.icepop_ratio_high"}},
      {"[trainer.loss]\nicepop_ratio_low = 0.3\n",
       {"trainer.loss.preset=slime/ppo"},
       {},
       {"icepop_ratio_low"},
       {"trainer.loss.icepop_ratio_low"}},
      {"[trainer.loss]\npreset = \"ppo\"\neps_low = 0.1\n",
       {},
       {"trainer.loss.preset"},
       {"--unset trainer.loss.preset", "eps_low"},
       {"trainer.loss.eps_low"}},
      {"[trainer]\nfinal_rate = 0.1\nschedule = \"linear\"\n",
       {"trainer.schedule=constant"},
       {},
       {"--set trainer.schedule", "trainer.final_rate = 0.1 (run.toml line 2)"},
       {"trainer.final_rate"}},
      {"[trainer]\nfinal_rate = 0.1\nschedule = \"linear\"\n",
       {},
       {"trainer.schedule"},
       {"--unset trainer.schedule"},
       {"trainer.final_rate"}},
      {"[model]\nhidden_size = 64\nhead_dim = 16\n",
       {"model.path=m"},
       {},
       {"model.hidden_size", "model.head_dim"},
       {"model.hidden_size", "model.head_dim"}},
      {"[trainer]\nminibatches = 4\noptimizer_steps = \"minibatch\"\n",
       {"trainer.minibatches=1"},
       {},
       {"trainer.optimizer_steps"},
       {}},
      {"[trainer]\nprox_forward = \"always\"\n[trainer.loss]\npreset = \"ppo\"\neps_low = 0.1\n",
       {"trainer.loss.preset=icepop"},
       {},
       {"eps_low"},
       {"trainer.loss.eps_low"}},
      {kSort + "min_length = 3\n",
       {"environment.name=arithmetic"},
       {},
       {"environment.0.min_length = 3"},
       {"environment.0.min_length"}},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.text);
    const Config config = parse_without(c.text, c.unsets, c.sets);
    ASSERT_FALSE(config.notes.empty());
    std::string notes;
    for (const std::string& note : config.notes) notes += note + "\n";
    expect_words(notes, c.note);
    for (const std::string& key : c.gone) EXPECT_EQ(origin_of(config, key), "(not there)") << key;
    EXPECT_TRUE(parse(config_toml(config)).notes.empty());
  }
}

// A run's own file has every default written out, and another preset on the command line means that
// preset as it is.
TEST(TakenAlong, AreDefaultsOfTheFilesPresetWhereAnotherHasOthers) {
  const std::vector<std::string> presets = {
      "grpo",    "ppo", "dapo",     "gspo",    "cispo",        "cispo_mask", "icepop",
      "dppo_tv", "dro", "grpo+tis", "ppo+tis", "verl/vanilla", "prime/ipo",  "slime/ppo"};
  for (const std::string& from : presets) {
    const std::string text = config_toml(parse("", {"trainer.loss.preset=" + from}));
    for (const std::string& to : presets) {
      SCOPED_TRACE(from + " to " + to);
      const std::string set = "trainer.loss.preset=" + to;
      const Config changed = parse(text, {set}), fresh = parse("", {set});
      EXPECT_EQ(changed.loss_spec.settings, fresh.loss_spec.settings);
    }
  }
  const std::string grpo = config_toml(parse("", {"trainer.loss.preset=grpo"}));
  const Config dapo = parse(grpo, {"trainer.loss.preset=dapo"});
  std::string notes;
  for (const std::string& note : dapo.notes) notes += note + "\n";
  expect_words(notes, {"--set trainer.loss.preset = \"dapo\" has other defaults",
                       "trainer.loss.eps_high = 0.2 (run.toml line "});
  // What somebody has set is kept where the other preset has such a key: in a file without the
  // rest, and in one that a run has written out.
  const Config kept = parse("[trainer.loss]\npreset = \"grpo\"\neps_low = 0.1\neps_high = 0.2\n",
                            {"trainer.loss.preset=dapo"});
  EXPECT_EQ(origin_of(kept, "trainer.loss.eps_low"), "run.toml line 3");
  EXPECT_EQ(origin_of(kept, "trainer.loss.eps_high"), "run.toml line 4");
  EXPECT_TRUE(kept.notes.empty());
  const std::string lower =
      config_toml(parse("", {"trainer.loss.preset=grpo", "trainer.loss.eps_low=0.1"}));
  const Config other_upper = parse(lower, {"trainer.loss.preset=dapo"});
  EXPECT_NE(origin_of(other_upper, "trainer.loss.eps_low"), "default");
  EXPECT_EQ(origin_of(other_upper, "trainer.loss.eps_high"), "default");
  // The same preset keeps all.
  EXPECT_TRUE(parse(grpo, {"trainer.loss.preset=grpo"}).notes.empty());
}

// cispo takes eps_low and eps_high together or not at all.
TEST(TakenAlong, AreNoDefaultsWithoutWhichTheRestMeansNothing) {
  const std::string pair = "[trainer.loss]\npreset = \"grpo\"\neps_low = 0.2\neps_high = 0.28\n";
  const std::string run =
      config_toml(parse("", {"trainer.loss.preset=dapo", "trainer.loss.eps_high=0.3"}));
  const std::vector<std::pair<std::string, std::vector<std::string>>> cases = {
      {pair, {"trainer.loss.preset=cispo"}},
      {run, {"trainer.loss.preset=cispo"}},
      {pair, {"trainer.loss.preset=cispo", "trainer.loss.eps_low=0.1"}},
      {run, {"trainer.loss.preset=cispo", "trainer.loss.eps_low=0.1"}}};
  for (const auto& [text, sets] : cases) {
    SCOPED_TRACE(text);
    const Config config = parse(text, sets);
    for (const char* key : {"trainer.loss.eps_low", "trainer.loss.eps_high"}) {
      EXPECT_NE(origin_of(config, key), "default");
      EXPECT_NE(origin_of(config, key), "(not there)");
    }
    for (const std::string& note : config.notes) EXPECT_EQ(note.find("eps_"), note.npos) << note;
  }
}

// A note tells what is the case: a preset of another code base without these keys has no other
// defaults for them.
TEST(TakenAlong, AreWithoutEffectForAPresetThatHasNoSuchKey) {
  const std::string icepop = config_toml(parse("", {}));
  for (const char* preset : {"verl/vanilla", "slime/ppo", "prime/ipo"}) {
    const Config config = parse(icepop, {std::string("trainer.loss.preset=") + preset});
    ASSERT_FALSE(config.notes.empty());
    for (const std::string& note : config.notes) {
      if (note.find("icepop_ratio_low") == note.npos) continue;
      expect_words(note, {"leaves these keys without effect"});
    }
  }
}

TEST(TakenAlong, AreNoKeysThatAreWrongAnywayOrGivenByTheCommandLineToo) {
  expect_words(error_of("[trainer.loss]\nicepop_ratio_lo = 0.3\n", {"trainer.loss.preset=ppo"}),
               {"run.toml line 2", "icepop_ratio_lo"});
  expect_words(error_of("", {"trainer.loss.preset=ppo", "trainer.loss.icepop_ratio_low=0.3"}),
               {"--set trainer.loss.icepop_ratio_low", "icepop"});
  expect_words(error_of("[trainer]\nfinal_rate = 0.1\nschedule = \"linear\"\n",
                        {"trainer.schedule=constant", "trainer.final_rate=0.2"}),
               {"--set trainer.final_rate = 0.2", "inert"});
  EXPECT_TRUE(parse("[trainer.loss]\nicepop_ratio_low = 0.3\n", {"trainer.loss.preset=icepop"})
                  .notes.empty());
}

TEST(Paths, OfAFileStartAtTheFileWhereTheyExistThereElseHere) {
  namespace fs = std::filesystem;
  const testing::TestFolder folder;
  const std::string inner = folder.path() + "/inner";
  fs::create_directories(inner + "/model");
  for (const char* name : {"/d.jsonl", "/s.jsonl", "/t.json"})
    std::ofstream(inner + name) << "{}\n";
  const std::string text =
      "output_dir = \"d.jsonl\"\n[model]\npath = \"model\"\ntokenizer = \"t.json\"\n"
      "[sft]\ndata = \"s.jsonl\"\n[trainer]\nreference = \"model\"\nteacher = \"elsewhere\"\n"
      "[trainer.loss]\npreset = \"grpo\"\nref_kl = 0.1\nteacher_tau = 0.5\n"
      "[[environment]]\nname = \"process\"\ndata = \"d.jsonl\"\neval_data = \"here.jsonl\"\n"
      "command = \"./d.jsonl\"\n";
  const Config config = parse_config(catalog, inner + "/run.toml", text, {}, ConfigScope::whole);
  const std::string here = fs::current_path().string();
  EXPECT_EQ(config.run.output_dir, "d.jsonl");
  EXPECT_EQ(config.run.model.path, inner + "/model");
  EXPECT_EQ(config.run.model.tokenizer, inner + "/t.json");
  EXPECT_EQ(config.run.sft.data, inner + "/s.jsonl");
  EXPECT_EQ(config.run.trainer.reference, inner + "/model");
  EXPECT_EQ(config.run.trainer.teacher, here + "/elsewhere");
  EXPECT_EQ(config.run.environments[0].data, inner + "/d.jsonl");
  EXPECT_EQ(config.run.environments[0].eval_data, here + "/here.jsonl");
  EXPECT_EQ(config.run.environments[0].command, "./d.jsonl");
  // The dump contains absolute paths, so that it means the same in every folder.
  EXPECT_EQ(effective_of(parse_config(catalog, "/elsewhere/run.toml", config_toml(config), {},
                                      ConfigScope::whole)),
            effective_of(config));
  EXPECT_EQ(origin_of(config, "model.path"), inner + "/run.toml line 3");
  // Paths in --set are relative to the working directory.
  const Config set =
      parse_config(catalog, inner + "/run.toml", text,
                   {"environment.data=d.jsonl", "model.tokenizer=byte"}, ConfigScope::whole);
  EXPECT_EQ(set.run.environments[0].data, here + "/d.jsonl");
  EXPECT_EQ(set.run.model.tokenizer, "byte");
}

TEST(Limits, DeepTomlIsRefusedWithItsLine) {
  std::string dots = "a";
  for (int i = 0; i < 50'000; ++i) dots += ".a";
  const std::string deep = std::string(50'000, '[') + std::string(50'000, ']');
  for (const std::string& text :
       {"\n" + dots + " = 1\n", "\n[" + dots + "]\n", "\nx = {" + dots + " = 1}\n",
        "\nx = " + deep + "\n", "\nx = [\"\"\"\\\"\n" + deep + "\n"}) {
    for (const ConfigScope scope : {ConfigScope::whole, ConfigScope::loss_only}) {
      try {
        parse_config(catalog, "run.toml", text, {}, scope);
        FAIL();
      } catch (const Error& error) {
        expect_words(error.what(), {"run.toml line "});
      }
    }
    EXPECT_THROW(parse_sweep("s", text), Error);
    EXPECT_THROW(parse("", {"seed=1" + text}), Error);
  }
  expect_words(error_of("\n\nx." + dots + " = 1\n"), {"run.toml line 3", "64 dots"});
  EXPECT_THROW(parse("", {dots + "=1"}), Error);
  // Dots in numbers, strings and comments do not count.
  std::string numbers = "x = [", comment = "#", quoted = "\"";
  for (int i = 0; i < 200; ++i) numbers += "1.5, ", comment += '.', quoted += '.';
  expect_words(error_of(numbers + "] " + comment + "\n"), {"line 1", "x = a list"});
  EXPECT_EQ(error_of("output_dir = " + quoted + "\" " + comment + "\n"), "");
}

TEST(Limits, AHugeTextIsRefused) {
  expect_words(error_of(std::string((size_t{16} << 20) + 1, '\n')), {"run.toml", "bytes"});
}

TEST(Limits, ThousandsOfEnvironmentsTakeNoTime) {
  std::string text;
  for (int i = 0; i < 4000; ++i) text += kSort + "max_length = 9\n";
  const auto begin = std::chrono::steady_clock::now();
  const Config config = parse(text);
  const std::string dump = config_toml(config);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  EXPECT_EQ(config.run.environments.size(), 4000u);
  EXPECT_EQ(config.run.environments[3999].id, "sort_4000");
  EXPECT_FALSE(dump.empty());
  // Under a second by far; a sanitizer on a busy machine needs more.
  EXPECT_LT(seconds.count(), 120.0);
}

}  // namespace
}  // namespace leeway
