#include "run/append_file.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "base/files.h"
#include "base/test_folder.h"
#include "leeway/error.h"

namespace leeway {
namespace {

namespace fs = std::filesystem;
using testing::TestFolder;

TEST(AppendFile, AddsLinesToWhatIsThereAndNoticesThatItIsGone) {
  const TestFolder folder;
  folder.write("a.jsonl", "old\n");
  AppendFile file(folder.at("a.jsonl"));
  file.append("new");
  EXPECT_EQ(read_file(folder.at("a.jsonl")), "old\nnew\n");
  EXPECT_EQ(file.size(), 8);
  EXPECT_FALSE(file.is_gone());
  fs::rename(folder.at("a.jsonl"), folder.at("b.jsonl"));
  EXPECT_TRUE(file.is_gone());
  folder.write("a.jsonl", "old\nnew\n");  // another file of the same name and content
  EXPECT_TRUE(file.is_gone());
  fs::rename(folder.at("b.jsonl"), folder.at("a.jsonl"));
  EXPECT_FALSE(file.is_gone());
  EXPECT_THROW(AppendFile(folder.at("no/such")), Error);
}

TEST(LogFile, IsCappedHoweverMuchIsWritten) {
  const TestFolder folder;
  const auto lengths = [&] {
    return std::pair(fs::file_size(folder.at("log.txt")), fs::file_size(folder.at("log.1.txt")));
  };
  {
    LogFile log(folder.path(), 4096);
    for (int i = 0; i < 3000; ++i) log.append("line " + std::to_string(i));
    EXPECT_LE(lengths().first, 4096u);
    EXPECT_LE(lengths().second, 4096u);
    EXPECT_GT(lengths().second, 4000u);
    // The newest lines exist, complete and in order.
    const std::string text = read_file(folder.at("log.1.txt")) + read_file(folder.at("log.txt"));
    EXPECT_TRUE(text.ends_with("line 2998\nline 2999\n"));
    EXPECT_TRUE(text.starts_with("line "));
    log.append(std::string(100000, 'x'));
    EXPECT_EQ(lengths().first, 4096u);
  }
  // A continued log counts what is already there.
  LogFile log(folder.path(), 4096);
  log.append("next");
  EXPECT_EQ(read_file(folder.at("log.txt")), "next\n");
  EXPECT_EQ(lengths().second, 4096u);
  EXPECT_EQ(folder.names(), (std::vector<std::string>{"log.1.txt", "log.txt"}));
}

TEST(LogFile, BeginsAnewWhereSomeoneRemovedIt) {
  const TestFolder folder;
  LogFile log(folder.path(), 4096);
  log.append("one");
  fs::remove(folder.at("log.txt"));
  log.append("two");
  EXPECT_EQ(read_file(folder.at("log.txt")), "two\n");
}

TEST(KeepStepFiles, TheFirstAndTheNewestStay) {
  const TestFolder folder;
  const std::vector<int> steps = {1, 2, 9, 10, 11, 100};
  const auto left = [&](int64_t keep) {
    for (const int step : steps) folder.write("step_" + std::to_string(step) + ".jsonl", "{}\n");
    folder.write("step_mine.jsonl", "");
    folder.write("step_3.json", "");
    keep_step_files(folder.path(), keep);
    std::vector<int> found;
    for (const int step : steps) {
      if (fs::exists(folder.at("step_" + std::to_string(step) + ".jsonl"))) found.push_back(step);
    }
    EXPECT_TRUE(fs::exists(folder.at("step_mine.jsonl")) && fs::exists(folder.at("step_3.json")));
    return found;
  };
  EXPECT_EQ(left(0), steps);
  EXPECT_EQ(left(6), steps);
  EXPECT_EQ(left(4), (std::vector<int>{1, 10, 11, 100}));
  EXPECT_EQ(left(2), (std::vector<int>{1, 100}));
  EXPECT_EQ(left(1), (std::vector<int>{100}));
  keep_step_files(folder.at("no/such"), 1);
}

}  // namespace
}  // namespace leeway
