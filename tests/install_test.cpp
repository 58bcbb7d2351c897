// What `cmake --install` leaves works on its own: the program with its pages, and a program of
// someone else that finds the package and computes a loss.

#include "cli_helpers.h"

namespace leeway {
namespace {

namespace fs = std::filesystem;

// Installed once for all tests here.
const fs::path& prefix() {
  static const TempFolder folder;
  static const fs::path path = [] {
    const fs::path to = folder.path() / "prefix";
    const RunResult result = run_program({"--install", LEEWAY_BINARY_DIR, "--prefix", to.string()},
                                         {.program = "cmake"});
    EXPECT_EQ(result.code, 0) << result;
    return to;
  }();
  return path;
}

std::string content_of(const fs::path& file) {
  std::ifstream stream(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

TEST(Install, TheProgramRunsWhereItIs) {
  const std::string program = (prefix() / "bin/leeway").string();
  const RunResult version = run_program({"--version"}, {.program = program});
  expect_quiet_success(version);
  EXPECT_EQ(version.out, run_program({"--version"}).out);
  const RunResult check = run_program({"loss", "explain", "icepop"}, {.program = program});
  expect_quiet_success(check);
}

TEST(Install, PutsPagesWhereShellsAndManLook) {
  const fs::path share = prefix() / "share";
  for (const auto& [file, args] : std::vector<std::pair<fs::path, std::vector<std::string>>>{
           {share / "man/man1/leeway.1", {"man"}},
           {share / "bash-completion/completions/leeway", {"completion", "bash"}},
           {share / "zsh/site-functions/_leeway", {"completion", "zsh"}},
           {share / "fish/vendor_completions.d/leeway.fish", {"completion", "fish"}}}) {
    ASSERT_TRUE(fs::exists(file)) << file;
    EXPECT_EQ(content_of(file), run_program(args).out) << file << ": of an older program";
  }
  for (const char* file :
       {"LICENSE", "README.md", "docs/configuration.md", "examples/01_sort/config.toml"}) {
    EXPECT_TRUE(fs::exists(share / "doc/leeway" / file)) << file;
  }
}

TEST(Install, InstallsEveryPublicHeaderAndWhatPyTorchLoads) {
  for (const auto& entry : fs::directory_iterator(LEEWAY_SOURCE_DIR "/include/leeway")) {
    EXPECT_TRUE(fs::exists(prefix() / "include/leeway" / entry.path().filename())) << entry;
  }
  size_t libraries = 0;
  for (const auto& entry : fs::recursive_directory_iterator(prefix())) {
    const std::string name = entry.path().filename().string();
    libraries += name == "libleeway_ops.so" || name == "libleeway_cuda.so" ? 1 : 0;
  }
  size_t built = 0;
  for (const char* name : {"libleeway_ops.so", "libleeway_cuda.so"}) {
    built += fs::exists(fs::path(LEEWAY_BINARY_DIR) / name) ? 1 : 0;
  }
  EXPECT_EQ(libraries, built);
}

// A program outside of this tree, as its own user would write it.
TEST(Install, APackageThatOthersBuildWith) {
  const TempFolder folder;
  folder.write("CMakeLists.txt",
               "cmake_minimum_required(VERSION 3.25)\n"
               "project(consumer LANGUAGES CXX)\n"
               "find_package(leeway 0.1 REQUIRED)\n"
               "add_executable(consumer consumer.cpp)\n"
               "target_link_libraries(consumer PRIVATE leeway::core)\n");
  folder.write("consumer.cpp", R"(#include <cstdio>
#include <leeway/evaluator.h>
#include <leeway/presets.h>

int main() {
  const float pi[] = {-1.0f, -0.5f}, rollout[] = {-1.0f, -0.5f}, advantages[] = {1.0f, -2.0f};
  const int64_t offsets[] = {0, 2};
  const uint8_t mask[] = {1, 1};
  float gradient[2];
  leeway::BatchView<float> batch;
  batch.offsets = offsets, batch.pi = pi, batch.rollout = rollout;
  batch.advantages = advantages, batch.mask = mask;
  const leeway::LossSpec spec = leeway::Catalog().make_spec("icepop", {});
  const double loss = leeway::Evaluator(1).evaluate(spec, batch, gradient);
  std::printf("%g %g %g\n", loss, gradient[0], gradient[1]);
}
)");
  const std::string build = folder / "build";
  const RunResult configured = run_program(
      {"-S", folder.path().string(), "-B", build, "-DCMAKE_PREFIX_PATH=" + prefix().string()},
      {.program = "cmake"});
  ASSERT_EQ(configured.code, 0) << configured;
  const RunResult built = run_program({"--build", build}, {.program = "cmake"});
  ASSERT_EQ(built.code, 0) << built;
  const RunResult result = run_program({}, {.program = build + "/consumer"});
  expect_quiet_success(result);
  EXPECT_EQ(result.out, "0.5 -0.5 1\n") << "all ratios are 1: -(1 - 2) / 2";
}

// examples/09_plugin as its own CMakeLists.txt builds it, far from this tree, for the program that
// is installed.
TEST(Install, APluginIsBuiltByItsOwnCMakeAndLoaded) {
  const TempFolder folder;
  fs::copy(LEEWAY_SOURCE_DIR "/examples/09_plugin", folder.path() / "source");
  const std::string build = folder / "build";
  const RunResult configured = run_program(
      {"-S", folder / "source", "-B", build, "-DCMAKE_PREFIX_PATH=" + prefix().string()},
      {.program = "cmake"});
  ASSERT_EQ(configured.code, 0) << configured;
  const RunResult built = run_program({"--build", build}, {.program = "cmake"});
  ASSERT_EQ(built.code, 0) << built;
  const RunResult explained = run_program({"loss", "explain", "reinforce+mine", "--plugin",
                                           build + "/libmine.so", "--set", "mine_high=2"},
                                          {.program = (prefix() / "bin/leeway").string()});
  expect_quiet_success(explained);
  for (const char* words :
       {"mine = min(pi/rollout, mine_high), detached", "mine_high = 2", "plugin/risen"}) {
    EXPECT_TRUE(contains(explained.out, words)) << explained.out;
  }
}

}  // namespace
}  // namespace leeway
