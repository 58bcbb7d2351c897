// TOML to settings, with file and line in every message.

#include "config/config.h"

#include <gtest/gtest.h>

#include "leeway/error.h"

namespace leeway {
namespace {

const Catalog catalog;

std::string error_of(const std::string& text, const std::vector<std::string>& sets = {},
                     ConfigScope scope = ConfigScope::whole) {
  try {
    parse_config(catalog, "run.toml", text, sets, scope);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(Config, SaysWhereEachValueCameFrom) {
  const Config config =
      parse_config(catalog, "run.toml", "[trainer.loss]\npreset = \"ipo_kl\"\n\nkl_tau = 1\n",
                   {"trainer.loss.ipo_ratio_high=3"}, ConfigScope::whole);
  EXPECT_EQ(config.preset, "ipo_kl");
  std::string text;
  for (const EffectiveValue& v : config.effective)
    text += v.key + "=" + v.value + "@" + v.origin + "\n";
  EXPECT_NE(text.find("trainer.loss.preset=\"ipo_kl\"@run.toml line 2\n"), std::string::npos)
      << text;
  EXPECT_NE(text.find("trainer.loss.kl_tau=1@run.toml line 4\n"), std::string::npos) << text;
  EXPECT_NE(text.find("trainer.loss.ipo_ratio_high=3@--set\n"), std::string::npos) << text;
  EXPECT_NE(text.find("trainer.loss.ipo_ratio_low=0.2@default\n"), std::string::npos) << text;
}

TEST(Config, WhatItPrintsIsAConfigurationWithTheSameEffect) {
  for (const char* preset :
       {"icepop", "ppo", "gspo", "cispo_mask", "grpo+tis", "m2po", "slime/ppo"}) {
    const Config first = parse_config(
        catalog, "a", "", {std::string("trainer.loss.preset=") + preset}, ConfigScope::whole);
    const std::string printed = config_toml(first);
    const Config second = parse_config(catalog, "b", printed, {}, ConfigScope::whole);
    EXPECT_EQ(first.loss_spec.settings, second.loss_spec.settings) << printed;
  }
}

TEST(Config, AnEmptyFileIsTheDefault) {
  EXPECT_EQ(parse_config(catalog, "a", "", {}, ConfigScope::whole).preset, "icepop");
}

TEST(Config, RefusalsNameFileLineKeyValueAndRemedy) {
  struct Case {
    std::string text;
    std::vector<std::string> says;
  };
  const std::vector<Case> cases = {
      {"[trainer.loss]\npreset = \"icepop\"\nicepop_ratio_lo = 0.3\n",
       {"run.toml line 3", "trainer.loss.icepop_ratio_lo = 0.3", "icepop_ratio_low?"}},
      {"[trainer.loss]\nicepop_ratio_low = \"a\"\n",
       {"run.toml line 2", "\"a\"", "must be a number"}},
      {"[trainer.loss]\nicepop_ratio_low = [1]\n", {"run.toml line 2", "a list"}},
      {"[trainer.loss]\nicepop_ratio_low = 1979-05-27\n", {"run.toml line 2", "date"}},
      {"[trainer.loss]\n[trainer.loss.deeper]\nx = 1\n", {"run.toml line 2", "a table"}},
      {"[trainer.loss]\npreset = 3\n", {"run.toml line 2", "preset = 3", "must be text"}},
      {"[trainer.loss]\npreset = \"icepopp\"\n",
       {"run.toml line 2", "icepopp", "did you mean icepop?"}},
      {"[trainer.los]\n", {"run.toml line 1", "did you mean trainer.loss?"}},
      {"[trainr]\n", {"run.toml line 1", "did you mean trainer?"}},
      {"trainer = 3\n", {"run.toml line 1", "must be a table"}},
      {"[trainer]\nloss = 3\n", {"run.toml line 2", "must be a table"}},
      {"[trainer.loss\n", {"run.toml line 1", "not valid TOML"}},
      {"[trainer.loss]\nkl_tau = 1\nkl_tau = 2\n", {"run.toml line 3", "not valid TOML"}},
      {"[trainer.loss]\npreset = \"ppo\"\neps_clip = 0.2\n", {"run.toml line 3", "eps_low"}},
  };
  for (const Case& c : cases) {
    const std::string message = error_of(c.text);
    EXPECT_FALSE(message.empty()) << c.text;
    for (const std::string& words : c.says) {
      EXPECT_NE(message.find(words), std::string::npos) << message << "\n  without: " << words;
    }
  }
  EXPECT_NE(error_of("", {"icepop_ratio_low=1"}).find("trainer.loss.icepop_ratio_low"),
            std::string::npos);
  EXPECT_NE(error_of("", {"x"}).find("key=value"), std::string::npos);
}

TEST(Config, LossOnlyLooksAtTheLossTableAlone) {
  const std::string text =
      "[other]\nx = 1\n[trainer]\nsteps = 3\n[trainer.loss]\npreset = \"ppo\"\n";
  EXPECT_FALSE(error_of(text).empty());
  EXPECT_EQ(error_of(text, {"eps_low=0.1"}, ConfigScope::loss_only), "");
}

TEST(Config, AssignmentsTakeTomlValuesAndBareStrings) {
  EXPECT_EQ(std::get<double>(parse_assignment("a=3").value), 3.0);
  EXPECT_EQ(std::get<double>(parse_assignment("a = .5").value), 0.5);
  EXPECT_EQ(std::get<double>(parse_assignment("a=1e-3").value), 1e-3);
  EXPECT_EQ(std::get<bool>(parse_assignment("a=true").value), true);
  EXPECT_EQ(std::get<std::string>(parse_assignment("a=\"off\"").value), "off");
  EXPECT_EQ(std::get<std::string>(parse_assignment("a=off").value), "off");
  EXPECT_EQ(std::get<std::string>(parse_assignment("a=0.5_2.0").value), "0.5_2.0");
  EXPECT_EQ(std::get<std::string>(parse_assignment("a=b=c").value), "b=c");
  EXPECT_THROW(parse_assignment("=3"), Error);
  EXPECT_THROW(parse_assignment("a=[1]"), Error);
}

}  // namespace
}  // namespace leeway
