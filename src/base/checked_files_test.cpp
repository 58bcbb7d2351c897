#include "base/checked_files.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>

#include "base/files.h"
#include "base/test_folder.h"
#include "leeway/error.h"

namespace leeway {
namespace {

using leeway::testing::TestFolder;

namespace fs = std::filesystem;

template <class Action>
std::string error_of(Action&& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

bool has(const std::string& text, const std::string& word) {
  return text.find(word) != std::string::npos;
}

TEST(FileWriter, SumsWhatItWritesPieceByPiece) {
  const TestFolder folder;
  const std::string path = folder.at("a.bin");
  std::string content;
  for (int i = 0; i < 3000000; ++i) content += static_cast<char>(i * 7 + i / 251);
  FileWriter file(path);
  for (size_t at = 0, size = 1; at < content.size(); at += size, size = size * 3 + 1) {
    size = std::min(size, content.size() - at);
    file.write(content.data() + at, size);
  }
  EXPECT_FALSE(fs::exists(path));
  const FileSum sum = file.commit();
  EXPECT_EQ(sum, (FileSum{content.size(), crc32c(content)}));
  EXPECT_EQ(sum, sum_of_file(path));
  EXPECT_EQ(read_file(path), content);
  EXPECT_EQ(write_file_atomically(path, "123456789"), (FileSum{9, 0xe3069283u}));
}

TEST(FileWriter, WithoutCommitTheOldFileStays) {
  const TestFolder folder;
  write_file_atomically(folder.at("a"), "old");
  {
    FileWriter file(folder.at("a"));
    file.write("new", 3);
  }
  EXPECT_EQ(read_file(folder.at("a")), "old");
  EXPECT_EQ(std::distance(fs::directory_iterator(folder.path()), fs::directory_iterator()), 1);
  EXPECT_TRUE(has(error_of([&] { FileWriter file(folder.at("no/such/a")); }), "no/such/a"));
}

TEST(CheckedFiles, SumsComeBackAndOtherTextsAreRefused) {
  const FileSums sums = {{"a", {3, 4294967295u}}, {"b.json", {0, 0}}};
  JsonWriter json;
  write_sums(json, sums);
  EXPECT_EQ(read_sums("m", parse_json("m", json.text())), sums);
  for (const char* wrong :
       {"[]", "1", R"({"a": 1})", R"({"a": {"bytes": 1}})", R"({"a": {"bytes": -1, "crc32c": 1}})",
        R"({"a": {"bytes": 1, "crc32c": 4294967296}})", R"({"a": {"bytes": 1.5, "crc32c": 1}})",
        R"({"../a": {"bytes": 1, "crc32c": 1}})", R"({"..": {"bytes": 1, "crc32c": 1}})",
        R"({"": {"bytes": 1, "crc32c": 1}})", R"({"a": {"bytes": NaN, "crc32c": 1}})"}) {
    EXPECT_TRUE(has(error_of([&] { read_sums("m", parse_json("m", wrong)); }), "m: ")) << wrong;
  }
}

TEST(CheckedFiles, ADamagedFileIsNamedWithTheRemedy) {
  const TestFolder folder;
  const auto make = [&] {
    FileSums sums;
    for (const char* name : {"a.json", "b.bin"}) {
      sums[name] = write_file_atomically(folder.at(name), std::string(name) + " content");
    }
    write_checksums(folder.path(), sums);
  };
  make();
  EXPECT_EQ(error_of([&] { check_checksums(folder.path()); }), "");
  std::ofstream(folder.at("b.bin"), std::ios::app) << "x";
  std::string error = error_of([&] { check_checksums(folder.path()); });
  EXPECT_TRUE(has(error, "b.bin: has 14 bytes, 13 were written")) << error;
  EXPECT_TRUE(has(error, "checksums.json")) << error;
  make();
  write_file_atomically(folder.at("a.json"), "a.json_content");
  error = error_of([&] { check_checksums(folder.path()); });
  EXPECT_TRUE(has(error, "a.json: is damaged")) << error;
  make();
  fs::remove(folder.at("a.json"));
  EXPECT_TRUE(has(error_of([&] { check_checksums(folder.path()); }), "a.json"));
  for (const char* text : {"", "{}", "[1]", "{\"format\": 2, \"files\": {}}", "{\"format\": 1}"}) {
    write_file_atomically(folder.at("checksums.json"), text);
    EXPECT_TRUE(has(error_of([&] { check_checksums(folder.path()); }), "checksums.json")) << text;
  }
  remove_checksums(folder.path());
  EXPECT_EQ(error_of([&] { check_checksums(folder.path()); }), "");
}

TEST(CheckedFiles, AFullDiskIsReportedWithBothNumbers) {
  const TestFolder folder;
  EXPECT_EQ(error_of([&] { refuse_full_disk(folder.at("not/there/yet"), 1000); }), "");
  const std::string error =
      error_of([&] { refuse_full_disk(folder.at("not/there"), uint64_t{1} << 60); });
  EXPECT_TRUE(has(error, "not/there: ")) << error;
  EXPECT_TRUE(has(error, "are free on its disk, 11529215046")) << error;
}

}  // namespace
}  // namespace leeway
