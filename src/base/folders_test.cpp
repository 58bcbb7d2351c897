#include "base/folders.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include "base/files.h"
#include "base/test_folder.h"
#include "leeway/error.h"

namespace leeway {
namespace {

std::string error_of(const auto& work) {
  try {
    work();
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

TEST(Folders, AreMadeWithThoseAbove) {
  const testing::TestFolder folder;
  make_folders(folder.at("a/b//c/"));
  EXPECT_EQ(folder_names(folder.at("a/b")), std::vector<std::string>{"c"});
  make_folders(folder.at("a/b"));  // exists already
  folder.write("file", "x");
  EXPECT_NE(error_of([&] { make_folders(folder.at("file")); }).find("file"), std::string::npos);
  EXPECT_NE(error_of([&] { make_folders(folder.at("file/inside")); }).find("Not a directory"),
            std::string::npos);
  EXPECT_NE(error_of([&] { make_folders(""); }), "");
  EXPECT_EQ(error_of([&] { make_folders("///"); }), "");  // the root exists
  EXPECT_NE(error_of([&] { make_folders(folder.at(std::string(300, 'n'))); }).find("too long"),
            std::string::npos);
}

TEST(Folders, HaveOnePathFromTheRoot) {
  const testing::TestFolder folder;
  make_folders(folder.at("a/b"));
  ASSERT_EQ(::symlink("a", folder.at("link").c_str()), 0);
  const std::string path = absolute_path(folder.at("a/b"));
  EXPECT_EQ(path[0], '/');
  EXPECT_TRUE(path.ends_with("/a/b"));
  EXPECT_EQ(absolute_path(folder.at("link/../link//b/.")), path);
  EXPECT_NE(error_of([&] { absolute_path(folder.at("none")); }).find("none"), std::string::npos);
}

TEST(Folders, ListTheirEntriesInOrder) {
  const testing::TestFolder folder;
  for (const char* name : {"b", ".hidden", "a"}) folder.write(name, "");
  EXPECT_EQ(folder_names(folder.path()), (std::vector<std::string>{".hidden", "a", "b"}));
  EXPECT_NE(error_of([&] { folder_names(folder.at("none")); }).find("none"), std::string::npos);
}

TEST(Folders, AreRemovedWithoutFollowingLinks) {
  const testing::TestFolder folder;
  make_folders(folder.at("kept"));
  folder.write("kept/file", "kept");
  make_folders(folder.at("gone/deep"));
  folder.write("gone/deep/file", "");
  ASSERT_EQ(::symlink(folder.at("kept").c_str(), folder.at("gone/link").c_str()), 0);
  ASSERT_EQ(::symlink("nowhere", folder.at("gone/dead").c_str()), 0);
  EXPECT_TRUE(path_exists(folder.at("gone/dead")));
  remove_tree(folder.at("gone"));
  EXPECT_FALSE(path_exists(folder.at("gone")));
  EXPECT_EQ(read_file(folder.at("kept/file")), "kept");
  remove_tree(folder.at("gone"));  // nothing to do
}

}  // namespace
}  // namespace leeway
