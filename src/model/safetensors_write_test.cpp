// Writing files: layout, round trips, and what happens on write errors.

#include <sys/wait.h>
#include <unistd.h>

#include <bit>
#include <cstring>
#include <filesystem>

#include "base/rng.h"
#include "base/test_disk.h"
#include "model/safetensors.h"
#include "model/test_files.h"

namespace leeway {
namespace {

using testing::as_bytes;
using testing::bytes_of;
using testing::expect_refused;
using testing::FileSizeLimit;
using testing::raw_safetensors;
using testing::TestFolder;

TEST(WriteSafetensors, LaysTheFileOutByNameWithAPaddedHeader) {
  const TestFolder folder;
  const std::vector<float> b = {1, 2, 3, 4, 5, 6}, a = {7};
  write_safetensors(folder.at("x"),
                    std::vector<TensorToSave>{{"b", {2, 3}, b}, {"a", {}, a}, {"c\"", {0, 4}, {}}});
  std::string header =
      R"({"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]},)"
      R"("b":{"dtype":"F32","shape":[2,3],"data_offsets":[4,28]},)"
      R"("c\"":{"dtype":"F32","shape":[0,4],"data_offsets":[28,28]}})";
  while (header.size() % 8 != 0) header += ' ';
  EXPECT_EQ(bytes_of(folder.at("x")),
            raw_safetensors(header, as_bytes<float>({7, 1, 2, 3, 4, 5, 6})));
  EXPECT_EQ(folder.names(), std::vector<std::string>{"x"});
}

TEST(WriteSafetensors, WhatIsWrittenIsReadBitForBit) {
  Rng rng(3);
  const TestFolder folder;
  for (int round = 0; round < 30; ++round) {
    std::vector<std::vector<float>> values;
    std::vector<TensorToSave> tensors;
    for (uint64_t n = rng.below(12); n > 0; --n) {
      const int64_t rows = static_cast<int64_t>(rng.below(20));
      const int64_t columns = static_cast<int64_t>(rng.below(30));
      auto& floats = values.emplace_back(static_cast<size_t>(rows * columns));
      for (float& v : floats) v = std::bit_cast<float>(static_cast<uint32_t>(rng.next()));
      tensors.push_back({fmt::format("tensor {}", rng.below(1000) * 100 + n), {rows, columns}, {}});
    }
    for (size_t i = 0; i < tensors.size(); ++i) tensors[i].values = values[i];
    write_safetensors(folder.at("x"), tensors);
    const SafetensorsFile file(folder.at("x"));
    ASSERT_EQ(file.tensors().size(), tensors.size());
    for (const TensorToSave& tensor : tensors) {
      const StoredTensor* stored = file.find(tensor.name);
      ASSERT_NE(stored, nullptr);
      EXPECT_EQ(stored->shape, tensor.shape);
      const std::string bytes = stored->bytes();
      ASSERT_EQ(bytes.size(), tensor.values.size_bytes());
      EXPECT_TRUE(std::equal(bytes.begin(), bytes.end(),
                             reinterpret_cast<const char*>(tensor.values.data())));
    }
  }
}

TEST(WriteSafetensors, AFolderThatIsNotThereIsNamed) {
  const TestFolder folder;
  const std::string path = folder.at("none/x");
  expect_refused([&] { write_safetensors(path, {}); }, {path, "cannot create", "No such file"});
}

TEST(WriteSafetensors, AFolderInTheWayStaysAndNoTemporaryIsLeft) {
  const TestFolder folder;
  std::filesystem::create_directory(folder.at("x"));
  expect_refused([&] { write_safetensors(folder.at("x"), {}); },
                 {folder.at("x"), "cannot write", "directory"});
  EXPECT_EQ(folder.names(), std::vector<std::string>{"x"});
}

// 400 kB, more than either of the limits below.
std::vector<float> many() { return std::vector<float>(100'000, 1.0f); }

TEST(WriteSafetensors, AFileTooLargeForTheLimitLeavesTheOldOne) {
  const TestFolder folder;
  folder.write("x", "old");
  {
    const FileSizeLimit limit(65536);
    const std::vector<float> values = many();
    expect_refused(
        [&] {
          write_safetensors(folder.at("x"), std::vector<TensorToSave>{{"a", {100'000}, values}});
        },
        {folder.at("x"), "cannot write: File too large"});
  }
  EXPECT_EQ(folder.names(), std::vector<std::string>{"x"});
  EXPECT_EQ(bytes_of(folder.at("x")), "old");
}

// In a separate process with private mounts, so that nothing stays mounted.
enum FullDisk { kAsPromised = 0, kNoMount = 10, kNotRefused, kOtherMessage, kOldFileLost };

int write_to_a_full_disk(const TestFolder& folder) {
  if (!testing::mount_small_disk(folder.path(), "128k")) return kNoMount;
  folder.write("x", "old");
  const std::vector<float> values = many();
  try {
    write_safetensors(folder.at("x"), std::vector<TensorToSave>{{"a", {100'000}, values}});
    return kNotRefused;
  } catch (const Error& error) {
    if (error.what() != folder.at("x") + ": cannot write: No space left on device") {
      return kOtherMessage;
    }
  }
  return folder.names() == std::vector<std::string>{"x"} && bytes_of(folder.at("x")) == "old"
             ? kAsPromised
             : kOldFileLost;
}

TEST(WriteSafetensors, AFullDiskIsNamedAndLeavesTheOldFile) {
  const TestFolder folder;
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) ::_exit(write_to_a_full_disk(folder));
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status)) << status;
  if (WEXITSTATUS(status) == kNoMount) GTEST_SKIP() << "needs the right to mount a small disk";
  EXPECT_EQ(WEXITSTATUS(status), kAsPromised);
}

}  // namespace
}  // namespace leeway
