// Printing a configuration: the dump, which parses back to the same values, and the reference page.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "base/files.h"
#include "base/rng.h"
#include "config/test_support.h"

namespace leeway {
namespace {

void expect_round_trip(const Config& first) {
  const std::string printed = config_toml(first);
  SCOPED_TRACE(printed);
  Config second;
  ASSERT_NO_THROW(second = parse(printed));
  EXPECT_EQ(values_of(first), values_of(second));
  EXPECT_EQ(effective_of(first), effective_of(second));
  EXPECT_EQ(first.loss_spec.settings, second.loss_spec.settings);
}

TEST(ConfigDump, IsReadBackToTheSameValues) {
  for (const std::string& text :
       {std::string(), kFull, std::string("[sft]\n"), std::string("[model]\npath = \"m\"\n"), kSort,
        kSort + kSort + "id = \"x\"\n" + kSort,
        std::string("[output]\nrollouts_every = 0\n[trainer]\nschedule = \"linear\"\n")}) {
    EXPECT_EQ(error_of(text), "");
    expect_round_trip(parse(text));
  }
  expect_round_trip(parse(kSort, {"environment.0.max_length=9", "sft.max_steps=3", "seed=0",
                                  "output_dir=a b", "trainer.entropy_bonus=-0.0",
                                  "orchestrator.max_error_reschedule_attempts=unlimited"}));
}

TEST(ConfigDump, IsReadBackForEveryPreset) {
  const Catalog catalog;
  std::vector<std::string> names;
  for (const PresetInfo& preset : catalog.presets()) names.push_back(preset.name);
  for (const ForeignPreset& preset : catalog.foreign()) names.push_back(preset.name);
  EXPECT_GT(names.size(), 80u);
  for (const std::string& name : names) {
    SCOPED_TRACE(name);
    const std::string set = "trainer.loss.preset=" + name;
    if (!error_of("", {set}).empty()) continue;  // some do not work without settings
    const Config first = parse("", {set});
    Config second;
    ASSERT_NO_THROW(second = parse(config_toml(first)));
    // A threshold of "2.0", which may be two numbers, becomes 2.
    ASSERT_EQ(first.loss_spec.settings.size(), second.loss_spec.settings.size());
    for (size_t i = 0; i < first.loss_spec.settings.size(); ++i) {
      const auto& [key, value] = first.loss_spec.settings[i];
      const auto& [key_again, value_again] = second.loss_spec.settings[i];
      EXPECT_EQ(key, key_again);
      EXPECT_TRUE(value == value_again || std::stod(value) == std::stod(value_again)) << key;
    }
  }
}

TEST(ConfigDump, IsTheSameWhereEveryValueComesThroughSet) {
  const Config first = parse(kFull);
  std::vector<std::string> sets;
  for (const EffectiveValue& value : first.effective) sets.push_back(value.key + "=" + value.value);
  const Config second = parse("", sets);
  EXPECT_EQ(values_of(first), values_of(second));
  EXPECT_EQ(effective_of(first), effective_of(second));
  EXPECT_EQ(origin_of(second, "trainer.max_steps"), "--set");
}

TEST(ConfigDump, HasTopLevelKeysFirstAndTablesInAFixedOrder) {
  const std::string printed = config_toml(parse(kFull));
  size_t before = 0;
  for (const char* words :
       {"output_dir = ", "seed = ", "[model]", "[sft]", "[trainer]", "[trainer.loss]",
        "[orchestrator]", "[orchestrator.renderer]", "[rollout]", "[eval]", "[output]",
        "[[environment]]\nname = \"sort\"", "[[environment]]\nname = \"calculator\"",
        "[[environment]]\nname = \"jsonl\""}) {
    const size_t at = printed.find(words, before);
    ASSERT_NE(at, std::string::npos) << words << "\n" << printed;
    before = at;
  }
}

TEST(ConfigDump, HasNoKeysWithoutEffect) {
  const std::string plain = effective_of(parse(kSort));
  for (const char* words : {"sft.", "final_rate", "environment.0.data", "renderer"}) {
    EXPECT_EQ(plain.find(words), std::string::npos) << words;
  }
  EXPECT_NE(plain.find("model.hidden_size"), std::string::npos);
  const std::string loaded = effective_of(parse("[model]\npath = \"/m\"\n[sft]\n"));
  EXPECT_NE(loaded.find("model.path = \"/m\"\nmodel.tokenizer = \"\"\nmodel.device = \"cpu\"\n"
                        "sft.max_steps"),
            std::string::npos)
      << loaded;
  EXPECT_EQ(loaded.find("sft.check_every"), std::string::npos);
}

TEST(ConfigDump, KeepsCommentsWholeWhateverTheFileIsCalled) {
  const Config first =
      parse_config(catalog, "a\nb = \x7f.toml", "seed = 3\n", {}, ConfigScope::whole);
  expect_round_trip(first);
}

TEST(ConfigDump, OfMutatedTextsReturnsOrThrowsError) {
  Rng rng(11);
  const std::string words[] = {"[",
                               "]",
                               "=",
                               "\"",
                               "\n",
                               "0",
                               "-1",
                               "1e400",
                               "nan",
                               "true",
                               "[[environment]]\n",
                               "name = \"jsonl\"\n",
                               "[model]\n",
                               "{}",
                               "path = \"x\"\n",
                               ".",
                               "'",
                               "\x7f",
                               "\xff"};
  size_t good = 0;
  for (int round = 0; round < 2000; ++round) {
    std::string text = kFull;
    const uint64_t edits = 1 + rng.below(3);
    for (uint64_t e = 0; e < edits; ++e) {
      const size_t at = rng.below(text.size());
      const std::string& word = words[rng.below(std::size(words))];
      switch (rng.below(4)) {
        case 0: text.insert(at, word); break;
        case 1: text.erase(at, 1 + rng.below(12)); break;
        case 2: text.replace(at, 1, word); break;
        default: {  // removes a line
          const size_t start = text.rfind('\n', at);
          if (start != std::string::npos) text.erase(start, text.find('\n', start + 1) - start);
        }
      }
    }
    try {
      const Config config = parse(text);
      expect_round_trip(config);
      ++good;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("run.toml line "), std::string::npos)
          << error.what() << "\n"
          << text;
    }
  }
  EXPECT_GT(good, 50u);
}

TEST(ConfigurationPage, IsTheOneInDocs) {
  EXPECT_EQ(read_file(LEEWAY_SOURCE_DIR "/docs/configuration.md"), configuration_markdown(catalog))
      << "write it anew with `leeway config --reference > docs/configuration.md`";
}

TEST(ConfigurationPage, HasEveryKeyWithItsDefault) {
  const std::string page = configuration_markdown(catalog);
  Config config;
  config.run.environments.resize(1);
  for (const Section& section : sections_of(config)) {
    for (const Field& field : section.fields) {
      EXPECT_NE(page.find(fmt::format("| `{}` |", field.key)), std::string::npos) << field.key;
      EXPECT_NE(page.find(fmt::format("`{}`", toml_text(field))), std::string::npos) << field.key;
      EXPECT_TRUE(field.meaning.ends_with(".")) << field.key;
    }
  }
}

}  // namespace
}  // namespace leeway
