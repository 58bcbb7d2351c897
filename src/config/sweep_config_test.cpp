// Sweep files: what they contain, and that problems are reported with their line.

#include "config/sweep_config.h"

#include <gtest/gtest.h>

#include "config/test_support.h"

namespace leeway {
namespace {

const std::string kTop = "base = \"base.toml\"\noutput_dir = \"runs/x\"\nseeds = [1, 2]\n";
const std::string kTable =
    "[[table]]\nname = \"reuse\"\nset = [\"trainer.epochs=8\"]\n"
    "[[table.row]]\nname = \"none\"\ntitle = \"no correction\"\n"
    "set = [\"trainer.loss.preset=reinforce\"]\n"
    "[[table.row]]\nname = \"on-policy_1\"\nset = [\n  \"trainer.epochs=1\",\n]\n";

std::string sweep_error(const std::string& text) {
  try {
    parse_sweep("sweep.toml", text);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(SweepConfig, HoldsWhatTheFileSays) {
  const SweepConfig sweep =
      parse_sweep("sweep.toml", kTop + kTable + "[[table]]\nname = \"b\"\ntitle = \"B\"\n" +
                                    "[[table.row]]\nname = \"none\"\n");
  EXPECT_EQ(sweep.base, "base.toml");
  EXPECT_EQ(sweep.output_dir, "runs/x");
  EXPECT_EQ(sweep.seeds, (std::vector<int64_t>{1, 2}));
  EXPECT_TRUE(sweep.keep_weights);
  EXPECT_FALSE(parse_sweep("sweep.toml", "keep_weights = false\n" + kTop + kTable).keep_weights);
  EXPECT_EQ(sweep_error("keep_weights = 1\n" + kTop + kTable),
            "sweep.toml line 1: keep_weights = 1: must be true or false");
  ASSERT_EQ(sweep.tables.size(), 2u);
  ASSERT_EQ(sweep.tables[0].rows.size(), 2u);
  EXPECT_EQ(sweep.tables[0].title, "reuse");
  EXPECT_EQ(sweep.tables[0].rows[0].title, "no correction");
  EXPECT_EQ(sweep.tables[0].rows[0].place, "sweep.toml line 7");
  EXPECT_EQ(sweep.tables[0].rows[1].title, "on-policy_1");
  EXPECT_EQ(sweep.tables[1].title, "B");
  EXPECT_TRUE(sweep.tables[1].rows[0].sets.empty());
}

TEST(SweepConfig, RowsOverrideTheirTableAndTheSeedComesLast) {
  const SweepConfig sweep = parse_sweep("sweep.toml", kTop + kTable);
  const SweepTable& table = sweep.tables[0];
  EXPECT_EQ(sweep_sets(table, table.rows[1], 7),
            (std::vector<std::string>{"trainer.epochs=8", "trainer.epochs=1", "seed=7"}));
  const Config config =
      sweep_run_config(catalog, table, table.rows[1], 7, "base.toml", "[trainer]\nepochs = 3\n");
  EXPECT_EQ(config.run.trainer.epochs, 1);
  EXPECT_EQ(config.run.seed, 7);
  EXPECT_EQ(sweep_run_config(catalog, table, table.rows[0], 7, "base.toml", "").preset,
            "reinforce");
}

TEST(SweepConfig, ABadRunIsNamedByPlaceTableAndRow) {
  const SweepConfig sweep = parse_sweep("sweep.toml", kTop + kTable);
  SweepTable table = sweep.tables[0];
  table.rows[1].sets = {"trainer.epoch=1"};
  try {
    sweep_run_config(catalog, table, table.rows[1], 7, "base.toml", "");
    FAIL();
  } catch (const Error& error) {
    expect_words(error.what(), {"sweep.toml line 11", "table reuse", "row on-policy_1",
                                "trainer.epoch", "did you mean trainer.epochs?"});
  }
}

TEST(SweepConfig, RefusalsNameFileLineKeyAndRemedy) {
  struct Case {
    std::string text;
    std::vector<std::string> says;
  };
  const std::string row = "[[table]]\nname = \"a\"\n[[table.row]]\nname = \"r\"\n";  // from line 4
  const std::vector<Case> cases = {
      {"base = \n", {"sweep.toml line 1", "not valid TOML"}},
      {"", {"base is missing"}},
      {"output_dir = \"x\"\nbas = \"b\"\n", {"line 2", "bas = \"b\"", "did you mean base?"}},
      {kTop + "jobs = 3\n", {"line 4", "jobs = 3", "unknown key", "known here: base"}},
      {"base = 3\n", {"line 1", "base = 3", "must be text"}},
      {"base = \"\"\n", {"line 1", "must not be empty"}},
      {"base = \"a\\nb\"\n", {"line 1", "one line"}},
      {"base = \"b\"\noutput_dir = \"o\"\nseeds = 3\n", {"line 3", "seeds = 3", "list"}},
      {"base = \"b\"\noutput_dir = \"o\"\nseeds = []\n", {"line 3", "list of integers"}},
      {"base = \"b\"\noutput_dir = \"o\"\nseeds = [1, 2.5]\n", {"line 3", "2.5"}},
      {"base = \"b\"\noutput_dir = \"o\"\nseeds = [1, 2, 1]\n", {"line 3", "1 occurs twice"}},
      {kTop, {"sweep.toml", "has no [[table]]"}},
      {kTop + "table = 1\n", {"line 4", "table = 1", "[[table]]"}},
      {kTop + "table = [1]\n", {"line 4", "[[table]]"}},
      {kTop + "[table]\nname = \"a\"\n", {"line 4", "a table", "[[table]]"}},
      {kTop + "[[table]]\nname = \"a\"\n", {"line 4", "has no [[table.row]]"}},
      {kTop + "[[table]]\n[[table.row]]\nname = \"r\"\n", {"line 4", "table.name is missing"}},
      {kTop + "[[table]]\nname = \"a/b\"\n", {"line 5", "table.name = \"a/b\"", "letters"}},
      {kTop + "[[table]]\nname = \"..\"\n", {"line 5", "letters"}},
      {kTop + row + "titel = \"x\"\n", {"line 8", "titel", "did you mean table.row.title?"}},
      {kTop + row + "set = \"a=1\"\n", {"line 8", "table.row.set", "list of strings"}},
      {kTop + row + "set = [1]\n", {"line 8", "1 in the list is not a string"}},
      {kTop + row + "set = [\n\"seed=1\"]\n", {"line 9", "seed=1", "leave it out"}},
      {kTop + row + "set = [\" output_dir = x\"]\n", {"line 8", "output_dir", "leave it out"}},
      {kTop + row + "set = [\"trainer.epochs\"]\n", {"line 8", "key=value"}},
      {kTop + row + "[[table.row]]\nname = \"r\"\n", {"line 9", "\"r\"", "occurs twice"}},
      {kTop + row + row, {"line 9", "\"a\"", "occurs twice"}},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.text);
    expect_words(sweep_error(c.text), c.says);
  }
}

}  // namespace
}  // namespace leeway
