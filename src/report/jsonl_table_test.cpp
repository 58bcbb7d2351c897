#include "report/jsonl_table.h"

#include <gtest/gtest.h>

#include <cmath>

#include "leeway/error.h"
#include "report/test_support.h"

namespace leeway {
namespace {

std::string row(int64_t step, const std::string& more = "") {
  return fmt::format("{{\"step\": {}, \"value\": {}{}}}\n", step, step * 2, more);
}

TEST(JsonlTable, ALongRunIsThinnedToWhatAChartShows) {
  const std::string folder = fresh_folder("thinned");
  const std::string path = folder + "/metrics.jsonl";
  for (const int64_t rows : {int64_t{3999}, int64_t{4000}, int64_t{4001}, int64_t{50001}}) {
    SCOPED_TRACE(rows);
    std::string text;
    for (int64_t step = 1; step <= rows; ++step) text += row(step);
    put_file(path, text);
    ReportNotes notes;
    const JsonlTable table = read_table(path, notes);
    EXPECT_LE(table.step.size(), kMostTableRows + 1);
    EXPECT_GE(table.step.size(), std::min<size_t>(static_cast<size_t>(rows), kMostTableRows / 2));
    EXPECT_EQ(table.step.front(), 1.0);
    EXPECT_EQ(table.step.back(), static_cast<double>(rows));
    const std::vector<double>& values = table.columns.at("value");
    ASSERT_EQ(values.size(), table.step.size());
    for (size_t i = 0; i < values.size(); ++i) ASSERT_EQ(values[i], 2 * table.step[i]);
    EXPECT_TRUE(std::is_sorted(table.step.begin(), table.step.end()));
    EXPECT_EQ(notes.size(), static_cast<size_t>(rows) > kMostTableRows ? 1u : 0u);
  }
}

// Rare values are often the ones a reader looks for.
TEST(JsonlTable, RareValuesSurviveTheThinning) {
  const std::string folder = fresh_folder("rare");
  std::string text;
  for (int64_t step = 1; step <= 40000; ++step) {
    text += row(step, step == 4444 ? ", \"rare\": 7" : "");
  }
  put_file(folder + "/metrics.jsonl", text);
  ReportNotes notes;
  const JsonlTable table = read_table(folder + "/metrics.jsonl", notes);
  size_t found = 0;
  for (size_t i = 0; i < table.step.size(); ++i) {
    const double value = table.columns.at("rare")[i];
    if (std::isnan(value)) continue;
    ++found;
    EXPECT_EQ(value, 7.0);
    EXPECT_NEAR(table.step[i], 4444.0, 16.0);
  }
  EXPECT_EQ(found, 1u);
}

TEST(JsonlTable, AResumedLongRunReplacesItsRows) {
  const std::string folder = fresh_folder("resumed_long");
  std::string text;
  for (int64_t step = 1; step <= 9000; ++step) text += row(step, ", \"life\": 1");
  for (int64_t step = 5001; step <= 9000; ++step) text += row(step, ", \"life\": 2");
  put_file(folder + "/metrics.jsonl", text);
  ReportNotes notes;
  const JsonlTable table = read_table(folder + "/metrics.jsonl", notes);
  EXPECT_TRUE(std::is_sorted(table.step.begin(), table.step.end()));
  for (size_t i = 0; i < table.step.size(); ++i) {
    ASSERT_EQ(table.columns.at("life")[i], table.step[i] > 5000 ? 2.0 : 1.0) << table.step[i];
  }
}

TEST(JsonlTable, NamesWithoutEndDoNotFillTheMemory) {
  const std::string folder = fresh_folder("names");
  std::string text;
  for (int64_t step = 1; step <= 2600; ++step) {
    text += row(step, fmt::format(", \"invented_{}\": 1", step));
  }
  put_file(folder + "/metrics.jsonl", text);
  ReportNotes notes;
  const JsonlTable table = read_table(folder + "/metrics.jsonl", notes);
  EXPECT_EQ(table.columns.size(), kMostTableColumns);
  EXPECT_TRUE(table.columns.contains("value"));
  ASSERT_FALSE(notes.empty());
  EXPECT_NE(notes.back().find("more than 2000 metric names"), std::string::npos) << notes.back();
}

TEST(JsonlTable, DamagedLinesAreLeftOutAndTold) {
  const std::string folder = fresh_folder("damaged");
  const std::string path = folder + "/metrics.jsonl";
  const std::string deep = "{\"step\": 2, \"a\": " + std::string(200000, '[') + "}\n";
  for (const std::string& line :
       {std::string("no json\n"), std::string("{\"step\": 2,}\n"), std::string("[1]\n"),
        std::string("{\"a\": 1}\n"), std::string("{\"step\": -1}\n"),
        std::string("{\"step\": 2, \"a\": \"text\"}\n"), std::string(3, '\0') + "\n", deep}) {
    put_file(path, row(1) + line + row(3));
    ReportNotes notes;
    const JsonlTable table = read_table(path, notes);
    EXPECT_EQ(table.step, (std::vector<double>{1.0, 3.0}));
    ASSERT_EQ(notes.size(), 1u);
    EXPECT_TRUE(notes[0].starts_with("a damaged line is left out: " + path + " line 2"))
        << notes[0].substr(0, 300);
  }
  put_file(path, row(1) + deep + "x\n" + row(3));
  ReportNotes notes;
  read_table(path, notes);
  EXPECT_TRUE(notes.at(0).starts_with("2 damaged lines are left out; the first: ")) << notes[0];
  // A file with no valid line at all does not belong to a run.
  put_file(path, "x\ny\n");
  EXPECT_THROW(read_table(path, notes), Error);
}

}  // namespace
}  // namespace leeway
