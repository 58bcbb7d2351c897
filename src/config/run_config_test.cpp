// The tables of a run: every key with its type and range, places and nearest names, --set.

#include "config/run_config.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "base/test_folder.h"
#include "config/test_support.h"

namespace leeway {
namespace {

TEST(RunConfig, OfAnEmptyTextIsAllDefaults) {
  const Config config = parse("");
  Config defaults;
  defaults.run.trainer.optimizer.learning_rate = 3.2e-4;  // the value of "auto"
  EXPECT_EQ(values_of(config), values_of(defaults));
  EXPECT_TRUE(config.run.environments.empty());
  for (const EffectiveValue& value : config.effective) {
    EXPECT_EQ(value.origin, value.key == "trainer.learning_rate" ? "default, auto" : "default");
  }
}

TEST(RunConfig, TheRateFallsWithTheWidthOfTheModel) {
  const auto rate = [](const std::string& text, const std::vector<std::string>& sets = {}) {
    return double{parse(text, sets).run.trainer.optimizer.learning_rate};
  };
  EXPECT_EQ(rate("[model]\nhidden_size = 128\n"), 2.1e-4);
  EXPECT_EQ(rate("[model]\nhidden_size = 4096\n"), 1.1e-6);
  // A folder has its own width; one that cannot be read is an error when the model is loaded.
  const testing::TestFolder folder;
  folder.write("config.json", "{\"hidden_size\": 1024}");
  const std::string path = "[model]\npath = \"" + folder.path() + "\"\n";
  EXPECT_EQ(rate(path), 9.2e-6);
  folder.write("config.json", "{\"hidden_size\": \"wide\"}");
  EXPECT_NE(config_toml(parse(path)).find("learning_rate = \"auto\""), std::string::npos);
  // Given numbers are kept, and the dump prints a number.
  EXPECT_EQ(rate("[trainer]\nlearning_rate = 1e-3\n"), 1e-3);
  EXPECT_EQ(rate("[trainer]\nlearning_rate = 0\n"), 0.0);
  EXPECT_EQ(rate("[trainer]\nlearning_rate = 1e-3\n", {"trainer.learning_rate=auto"}), 3.2e-4);
  const Config config = parse("[trainer]\nlearning_rate = \"auto\"\n");
  EXPECT_EQ(origin_of(config, "trainer.learning_rate"), "run.toml line 2, auto");
  const Config again = parse(config_toml(config), {"model.hidden_size=512"});
  EXPECT_EQ(double{again.run.trainer.optimizer.learning_rate}, 3.2e-4);
  expect_words(error_of("[trainer]\nlearning_rate = \"Auto\"\n"), {"line 2", "or \"auto\""});
  expect_words(error_of("[sft]\nlearning_rate = \"auto\"\n"), {"line 2", "finite number"});
}

TEST(RunConfig, AFlagThatHasBecomeAChoiceStillTakesTrueAndFalse) {
  const auto recompute = [](const std::string& value, const std::vector<std::string>& sets = {}) {
    return parse("[trainer]\nrecompute_activations = " + value + "\n", sets)
        .run.trainer.recompute_activations;
  };
  EXPECT_EQ(recompute("false"), Recompute::off);
  EXPECT_EQ(recompute("true"), Recompute::layer);
  EXPECT_EQ(recompute("\"selective\""), Recompute::selective);
  EXPECT_EQ(recompute("false", {"trainer.recompute_activations=true"}), Recompute::layer);
  EXPECT_EQ(recompute("false", {"trainer.recompute_activations=layer"}), Recompute::layer);
  const Config config = parse("[trainer]\nrecompute_activations = true\n");
  EXPECT_NE(config_toml(config).find("recompute_activations = \"layer\""), std::string::npos);
  EXPECT_EQ(parse(config_toml(config)).run.trainer.recompute_activations, Recompute::layer);
}

TEST(RunConfig, TakesEveryKey) {
  Config config = parse(kFull), defaults;
  // As many environments as the file has, so that the tables can be compared.
  defaults.run.environments.resize(3);
  const auto given = sections_of(config), initial = sections_of(defaults);
  ASSERT_EQ(given.size(), initial.size());
  for (size_t s = 0; s < given.size(); ++s) {
    if (given[s].path == "model.lora") continue;  // goes with model.path, which makes others inert
    for (size_t f = 0; f < given[s].fields.size(); ++f) {
      const Field& field = given[s].fields[f];
      // Setting these would make others inert.
      if (!field.inert.empty() || field.key == "path" || field.key == "device") continue;
      if (field.key == "pool") continue;
      if (field.key == "advantage_command" || field.key == "advantage_timeout") continue;
      EXPECT_NE(toml_text(field), toml_text(initial[s].fields[f])) << given[s].path << field.key;
      if (!field.in_dump) continue;
      EXPECT_TRUE(origin_of(config, given[s].prefix() + field.key).starts_with("run.toml line "));
    }
  }
  EXPECT_EQ(config.run.output_dir, "runs/\xc3\xa9 \"x\" \\ \x7f");
  EXPECT_EQ(config.run.seed, 9007199254740991);
  EXPECT_EQ(config.run.sft.optimizer.learning_rate, 0.1234567890123456);
  EXPECT_EQ(config.run.trainer.optimizer.learning_rate, 2.0);
  EXPECT_FALSE(config.run.orchestrator.max_error_reschedule_attempts.has_value());
  EXPECT_EQ(config.run.rollout.stop, "\n");
  EXPECT_EQ(config.run.environments[2].verifier, VerifierKind::regex);
}

TEST(RunConfig, SaysWhereEachValueCameFrom) {
  const Config config = parse("seed = 3\n[trainer]\n\nmax_steps = 5\nepochs = 2\n" + kSort,
                              {"trainer.epochs=4", "environment.max_length=9"});
  EXPECT_EQ(origin_of(config, "seed"), "run.toml line 1");
  EXPECT_EQ(origin_of(config, "output_dir"), "default");
  EXPECT_EQ(origin_of(config, "trainer.max_steps"), "run.toml line 4");
  EXPECT_EQ(origin_of(config, "trainer.epochs"), "--set");
  EXPECT_EQ(origin_of(config, "environment.0.name"), "run.toml line 7");
  EXPECT_EQ(origin_of(config, "environment.0.max_length"), "--set");
  EXPECT_EQ(config.run.trainer.epochs, 4);
  EXPECT_EQ(config.run.environments[0].max_length, 9);
}

// Every key with values of all types, within and beyond its range.
TEST(RunConfig, RefusesWrongTypesAndRangesOfEveryKey) {
  Config config;
  config.run.environments.resize(4);
  const char* const names[] = {"sort", "arithmetic", "calculator", "jsonl"};
  for (size_t i = 0; i < 4; ++i) config.run.environments[i].name = names[i];
  size_t checked = 0;
  for (const Section& section : sections_of(config)) {
    for (const Field& field : section.fields) {
      const bool environment = section.path.starts_with("environment.");
      if (!field.owners.empty() && !field.inert.empty()) continue;
      const std::string header = section.path.empty() ? "\n"
                                 : environment        ? "[[environment]]\n"
                                                      : "[" + section.path + "]\n";
      const std::string shown =
          environment ? "environment.0." + field.key : section.prefix() + field.key;
      auto refused = [&](const std::string& value, const std::string& words) {
        SCOPED_TRACE(shown + " = " + value);
        expect_words(error_of(header + field.key + " = " + value + "\n"),
                     {"run.toml line 2: " + shown + " = ", words});
        ++checked;
      };
      const std::string type = type_text(field);
      refused("[1]", "a list");
      refused("{a = 1}", "a table");
      refused("2024-01-01", "a date");
      if (type != "true or false" && field.if_true.empty()) refused("true", "must be");
      if (type == "true or false") {
        refused("1", "true or false");
        refused("\"true\"", "true or false");
        continue;
      }
      if (type == "list of text") {
        refused("3", "a list of text");
        refused("[\"a\", 3]", "a list");
        refused("[\"a\\u0000b\"]", "NUL");
        continue;
      }
      if (type == "text") {
        refused("3", "in quotes");
        refused("\"a\\u0000b\"", field.choices.empty() ? "NUL" : "");
        if (!field.choices.empty()) {
          refused("\"" + field.choices.front() + "q\"", "did you mean " + field.choices.front());
          refused("\"\"", field.choices.back());
        }
        if (!field.may_be_empty) refused("\"\"", "not empty");
        continue;
      }
      refused("\"3\"", "must be");
      refused("nan", "must be");
      refused("inf", "must be");
      const std::string range = field.range.text();
      if (type == "integer") {
        refused("1.5", "an integer, " + range);
        refused("1e3", "without decimal point or exponent");
        refused(fmt::format("{}", static_cast<int64_t>(field.range.low) - 1), range);
        refused(fmt::format("{}", static_cast<int64_t>(field.range.high) + 1), range);
        refused("9223372036854775807", range);
        refused("-9223372036854775808", range);
      } else {
        refused(fmt::format("{}", field.range.open_low ? field.range.low : -1e-9), range);
        if (field.range.high == 1) refused(field.range.open_high ? "1.0" : "1.0000001", range);
      }
    }
  }
  EXPECT_GT(checked, 500u);
}

TEST(RunConfig, TakesTheEndsOfARange) {
  for (const char* text :
       {"seed = 0", "[rollout]\ntop_p = 1", "[rollout]\ntemperature = 0", "[trainer]\nbeta1 = 0",
        "[trainer]\nmax_tokens = 1073741824", "[rollout]\nkv_bytes = 1",
        "[orchestrator]\nmax_error_reschedule_attempts = 1",
        "[orchestrator]\ngroup_size = 1\nadvantage = \"none\""}) {
    EXPECT_EQ(error_of(text), "") << text;
  }
  expect_words(error_of("[orchestrator]\nmax_error_reschedule_attempts = \"never\"\n"),
               {"line 2", "\"never\"", "1 to", "unlimited"});
}

TEST(RunConfig, NamesTheNearestKeyAndTheTableAKeyBelongsTo) {
  struct Case {
    std::string text;
    std::vector<std::string> says;
  };
  const std::vector<Case> cases = {
      {"[trainer]\nmax_step = 3\n",
       {"run.toml line 2: trainer.max_step = 3", "did you mean trainer.max_steps?"}},
      {"[trainer]\ntemperature = 3\n", {"did you mean rollout.temperature?"}},
      {"learning_rate = 3\n", {"line 1", "sft.learning_rate or trainer.learning_rate"}},
      {"[trainer]\neps_low = 0.1\n", {"did you mean trainer.loss.eps_low?"}},
      {"[loss]\npreset = \"ppo\"\n", {"line 1", "a table", "did you mean trainer.loss?"}},
      {"[rollouts]\n", {"did you mean rollout?"}},
      {"[eval]\nzzzzzzzzzz = 3\n", {"known here: every, prompts, samples, greedy"}},
      {"[sft]\nenabled = true\n", {"line 2", "sft.enabled", "unknown key"}},
      {"outptu_dir = \"x\"\n", {"did you mean output_dir?"}},
      {kSort + kSort + "max_lenght = 3\n", {"line 5", "did you mean environment.1.max_length?"}},
      {"[environment]\nname = \"sort\"\n", {"line 1", "[[environment]]"}},
      {"environment = [3]\n", {"line 1", "environment.0 = 3", "[[environment]]"}},
      {"environment = 3\n", {"line 1", "environment = 3", "[[environment]]"}},
      {"rollout = 3\n", {"line 1", "rollout = 3", "must be a table"}},
      {"[[rollout]]\n", {"line 1", "rollout = a list", "must be a table"}},
      {"[trainer.max_steps]\n", {"line 1", "trainer.max_steps = a table", "an integer"}},
      {"[eval]\n[eval]\n", {"line 2", "not valid TOML"}},
      {"[eval]\nevery = 1\nevery = 2\n", {"line 3", "not valid TOML"}},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.text);
    expect_words(error_of(c.text), c.says);
  }
}

TEST(RunConfig, TakesSetsByPath) {
  const std::vector<std::pair<std::vector<std::string>, std::vector<std::string>>> bad = {
      {{"max_steps=3"}, {"--set max_steps = 3", "sft.max_steps or trainer.max_steps"}},
      {{"trainer.max_step=3"}, {"--set trainer.max_step = 3", "did you mean trainer.max_steps?"}},
      {{"trainr.max_steps=3"}, {"--set trainr.max_steps = 3", "trainer.max_steps"}},
      {{"trainer.max_steps=0"}, {"--set trainer.max_steps = 0", "1 to"}},
      {{"trainer.max_steps=1.5"}, {"1.5", "an integer"}},
      {{"trainer.max_steps=many"}, {"\"many\"", "an integer"}},
      {{"output_dir=3"}, {"--set output_dir = 3", "quotes"}},
      {{"output_dir=\xff"}, {"--set output_dir", "UTF-8"}},
      {{"trainer=3"}, {"--set trainer = 3", "a table", "trainer.KEY=VALUE"}},
      {{"environment=3"}, {"a table"}},
      {{" = 3"}, {"key=value"}},
      {{"zzzzzzzzzzzzz=3"}, {"known here: output_dir, seed, model"}},
      {{"zzzz.zzzzzzzzzzzzz=3"}, {"leeway config --reference"}},
      {{"environment.max_length=3"}, {"there is no [[environment]]", "environment.0.max_length"}},
      {{"environment.0.max_length=3"}, {"there is no [[environment]]", "environment.0.name"}},
      {{"environment.0.name=sort", "environment.2.name=sort"}, {"environment, number 0"}},
      {{"environment.0.name=sort", "environment.-1.name=sort"}, {"environment.-1.name"}},
      {{"environment.0.name=sort", "environment.1.name=sort", "environment.weight=2"},
       {"2 environments, numbers 0 to 1"}},
      {{"environment.0.name=sort", "environment.0.max_lengt=3"},
       {"did you mean environment.0.max_length?"}}};
  for (const auto& [sets, words] : bad) {
    SCOPED_TRACE(sets.back());
    expect_words(error_of("", sets), words);
  }
  const Config config =
      parse(kSort + kSort, {"environment.1.max_length=9", "seed=007",
                            "environment.2.name=arithmetic", "environment.2.terms=3",
                            "trainer.epochs=2", "trainer.epochs=3", "trainer.learning_rate=.5"});
  EXPECT_EQ(config.run.environments[0].max_length, 8);
  EXPECT_EQ(config.run.environments[1].max_length, 9);
  EXPECT_EQ(config.run.environments[2].terms, 3);
  EXPECT_EQ(config.run.seed, 7);
  EXPECT_EQ(config.run.trainer.epochs, 3);
  EXPECT_EQ(config.run.trainer.optimizer.learning_rate, 0.5);
}

TEST(RunConfig, HasAWarmStartWhereTheTableIsThere) {
  EXPECT_FALSE(parse("").run.sft.enabled);
  EXPECT_TRUE(parse("[sft]\n").run.sft.enabled);
  EXPECT_TRUE(parse("sft = {}\n").run.sft.enabled);
  EXPECT_TRUE(parse("", {"sft.max_steps=3"}).run.sft.enabled);
}

TEST(RunConfig, OfTheLossAloneKeepsItsDefaults) {
  const Config config =
      parse_config(catalog, "a", "seed = \"x\"\n[trainer]\nmax_steps = 0\n[trainer.loss]\n",
                   {"icepop_ratio_low=0.3"}, ConfigScope::loss_only);
  EXPECT_EQ(values_of(config), values_of(Config{}));
  for (const EffectiveValue& value : config.effective) {
    EXPECT_TRUE(value.key.starts_with("trainer.loss.")) << value.key;
  }
}

}  // namespace
}  // namespace leeway
