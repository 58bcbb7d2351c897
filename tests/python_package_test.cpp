// python/leeway: its own tests, with operators that are built for the PyTorch of a virtual
// environment, and the trainers it plugs into from PyPI.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "base/files.h"
#include "cli_helpers.h"
#include "python_packages.h"

namespace leeway {
namespace {

namespace fs = std::filesystem;

constexpr const char* kPackage = LEEWAY_SOURCE_DIR "/python/leeway";

// verl's own requirements exclude TRL's, so what its loss functions import is listed.
PythonPackages trainer_packages() {
  return python_packages("python_trainers",
                         {"torch==2.13.0", "pytest", "scikit-build-core", "trl==1.16.0", "ray",
                          "tensordict", "hydra-core", "codetiming", "orjson", "pillow"},
                         {"verl==0.9.1"});
}

struct Operators {
  std::string python, library, skip;
};

// The operators for the environment's PyTorch; only they are compiled, the layers below are this
// build's.
Operators operators() {
  const auto [program, skip] = trainer_packages();
  if (!skip.empty()) return {"", "", skip};
  if (program.empty()) return {};
  const RunResult torch =
      python({"-c", "import torch; print(torch.utils.cmake_prefix_path, end='')"}, program);
  EXPECT_EQ(torch.code, 0) << torch;
  const std::string folder = LEEWAY_BINARY_DIR "/python_ops";
  const auto run = [&](const std::string& tool, const std::vector<std::string>& args) {
    const RunResult result = python(args, tool, std::chrono::seconds(900));
    EXPECT_EQ(result.code, 0) << result;
    return result.code == 0;
  };
  const bool built =
      run("cmake", {"-G", "Ninja", "-S", LEEWAY_SOURCE_DIR, "-B", folder,
                    "-DCMAKE_BUILD_TYPE=Release", "-DLEEWAY_OPS_ONLY=ON", "-DLEEWAY_COLD_BUILD=ON",
                    "-DLEEWAY_BUILT=" LEEWAY_BINARY_DIR, "-DCMAKE_PREFIX_PATH=" + torch.out}) &&
      run("ninja", {"-C", folder, "leeway_ops"});
  return {built ? program : "", folder + "/libleeway_ops.so", ""};
}

// Runs files of python/leeway/tests.
void run_tests(const std::vector<std::string>& files) {
  const Operators ops = operators();
  if (!ops.skip.empty()) GTEST_SKIP() << ops.skip;
  ASSERT_FALSE(ops.python.empty());
  std::vector<std::string> args = {"LEEWAY_OPS=" + ops.library,
                                   std::string("PYTHONPATH=") + kPackage,
                                   "HF_HUB_OFFLINE=1",
                                   "PYTHONDONTWRITEBYTECODE=1",
                                   ops.python,
                                   "-m",
                                   "pytest",
                                   "-q",
                                   "-p",
                                   "no:cacheprovider"};
  for (const std::string& file : files) args.push_back(std::string(kPackage) + "/tests/" + file);
  const RunResult result = python(args, "env", std::chrono::seconds(1200));
  EXPECT_EQ(result.code, 0) << result.out.substr(result.out.size() -
                                                 std::min<size_t>(result.out.size(), 6000));
  EXPECT_TRUE(contains(result.out, " passed")) << result;
  EXPECT_FALSE(contains(result.out, "skipped")) << result.out;
}

TEST(PythonPackage, LossesHeadsAndMistakes) {
  run_tests({"test_losses.py", "test_head.py", "test_mistakes.py"});
}

TEST(PythonPackage, CorrectionsOfOnesOwn) { run_tests({"test_correction.py"}); }

TEST(PythonPackage, PrimeRlAndSlime) { run_tests({"test_prime_rl.py", "test_slime.py"}); }

TEST(PythonPackage, SeedLossesHaveTheirNumbersInEveryHost) { run_tests({"test_equality.py"}); }

TEST(PythonPackage, TrlFromPyPI) { run_tests({"test_trl.py"}); }

// The reward of the last line; a random model has about 0.1.
TEST(PythonPackage, TheExampleForTrlLearns) {
  const Operators ops = operators();
  if (!ops.skip.empty()) GTEST_SKIP() << ops.skip;
  ASSERT_FALSE(ops.python.empty());
  const RunResult result = python(
      {"LEEWAY_OPS=" + ops.library, std::string("PYTHONPATH=") + kPackage, "HF_HUB_OFFLINE=1",
       "PYTHONDONTWRITEBYTECODE=1", ops.python, LEEWAY_SOURCE_DIR "/examples/trl_grpo.py"},
      "env", std::chrono::seconds(600));
  ASSERT_EQ(result.code, 0) << result;
  const size_t last = result.out.rfind("reward ");
  ASSERT_NE(last, std::string::npos) << result;
  EXPECT_GT(std::stod(result.out.substr(last + 7)), 0.5) << result;
}

TEST(PythonPackage, VerlFromPyPI) { run_tests({"test_verl.py"}); }

// slime's dumps are pickles, which `leeway import` reads by the python3 of the PATH.
TEST(PythonPackage, ImportReadsSlimesDebugData) {
  const auto [program, skip] = trainer_packages();
  if (!skip.empty()) GTEST_SKIP() << skip;
  ASSERT_FALSE(program.empty());
  const TempFolder folder;
  const std::string write =
      "import sys, torch\n"
      "t = torch.tensor\n"
      "s = [{'log_probs': t([-1.1, -1.0]), 'rollout_log_probs': t([-1.0, -2.0]), 'advantages':"
      " t([0.5, 0.5]), 'loss_masks': t([1, 1]), 'response_lengths': 2, 'sample_index': 0}]\n"
      "torch.save({'format_version': 2, 'samples': s, 'dp_shards': []}, sys.argv[1])\n"
      "torch.save({'samples': [{'advantages': t([1.0])}]}, sys.argv[2])\n";
  ASSERT_EQ(python({"-c", write, folder / "data.pt", folder / "bad.pt"}, program).code, 0);
  const std::string first = fs::path(program).parent_path().string();
  const auto import = [&](const std::string& file) {
    return run_program({"import", "slime", folder / file, "--output", folder / "batch.json"},
                       {.path_first = first, .time_limit = std::chrono::seconds(120)});
  };
  const RunResult result = import("data.pt");
  ASSERT_EQ(result.code, 0) << result;
  for (const char* words : {"pi/prox is 1", "no ref log-probabilities", "1 sequences, 2 trained"}) {
    EXPECT_TRUE(contains(result.err, words)) << result;
  }
  const RunResult loss =
      run_program({"loss", "eval", "--preset", "ppo+tis", "--batch", folder / "batch.json"});
  ASSERT_EQ(loss.code, 0) << loss;
  // -A min(prox/rollout, 5), the ratio being 1.
  EXPECT_NEAR(json_of(loss.out)["loss"].GetDouble(), -0.5 * (std::exp(-0.1) + std::exp(1.0)) / 2.0,
              1e-6);
  const RunResult bad = import("bad.pt");
  EXPECT_EQ(bad.code, 2);
  EXPECT_TRUE(contains(bad.err, "sample 0 has no loss_masks")) << bad;
  write_file_atomically(folder / "text.pt", "nothing");
  EXPECT_EQ(import("text.pt").code, 2);
}

// With a library that is built already: what pip packs, and that it is found where it was
// installed.
TEST(PythonPackage, PipInstallsIt) {
  const Operators ops = operators();
  if (!ops.skip.empty()) GTEST_SKIP() << ops.skip;
  ASSERT_FALSE(ops.python.empty());
  const TempFolder folder;
  const RunResult pip =
      python({"-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-build-isolation",
              "--no-deps", "--no-index", "--target", folder / "site",
              "--config-settings=cmake.define.LEEWAY_OPS=" + ops.library,
              "--config-settings=build-dir=" + (folder / "build"), kPackage},
             ops.python, std::chrono::seconds(300));
  ASSERT_EQ(pip.code, 0) << pip;
  const RunResult used = run_program(
      {"PYTHONPATH=" + (folder / "site"), "LEEWAY_OPS=", ops.python, "-c",
       "import leeway, importlib.metadata as m\n"
       "assert leeway.__file__.startswith('" +
           (folder / "site") +
           "')\n"
           "print(len(leeway.presets()) > 20, [e.value for e in "
           "m.entry_points(group='verl.plugins')])"},
      {.directory = folder / "site", .time_limit = std::chrono::seconds(120), .program = "env"});
  EXPECT_EQ(used.out, "True ['leeway.integrations.verl']\n") << used;
}

std::string copy_of_package(const TempFolder& folder) {
  const fs::path to = folder.path() / "alone" / "leeway";
  fs::create_directories(to.parent_path());
  fs::copy(kPackage, to, fs::copy_options::recursive);
  return to.string();
}

const char* const kMakeSdist =
    "import os, sys\n"
    "os.chdir(sys.argv[1]); sys.path.insert(0, '_build')\n"
    "import backend\n"
    "print(backend.build_sdist(sys.argv[2]))\n";

// Far from this tree the operators are compiled from the archive's sources; the layers below, which
// would take minutes, are this build's, and their sources are looked for in the archive.
TEST(PythonPackage, AnSdistBuildsAWheelThatWorksElsewhere) {
  const auto [program, skip] = trainer_packages();
  if (!skip.empty()) GTEST_SKIP() << skip;
  ASSERT_FALSE(program.empty());
  const TempFolder folder;
  const RunResult sdist = python({"-c", kMakeSdist, kPackage, folder.path().string()}, program);
  ASSERT_EQ(sdist.code, 0) << sdist;
  const std::string archive = folder / "leeway-0.1.0.tar.gz";
  ASSERT_TRUE(fs::exists(archive)) << sdist;
  EXPECT_FALSE(fs::exists(std::string(kPackage) + "/native")) << "left behind";
  const RunResult listed = python({"tzf", archive}, "tar");
  for (const char* layer : {"include", "src/base", "src/core", "src/kernels", "src/torch/ops"}) {
    for (const auto& entry :
         fs::recursive_directory_iterator(fs::path(LEEWAY_SOURCE_DIR) / layer)) {
      const fs::path file = fs::relative(entry.path(), LEEWAY_SOURCE_DIR);
      if (entry.is_directory() || file.string().ends_with("_test.cpp")) continue;
      EXPECT_TRUE(contains(listed.out, "/native/" + file.string() + "\n")) << file;
    }
  }
  const RunResult wheel =
      python({"-m", "pip", "wheel", "-q", "--disable-pip-version-check", "--no-build-isolation",
              "--no-deps", "--no-index", "--wheel-dir", folder / "wheels",
              "--config-settings=cmake.define.LEEWAY_BUILT=" LEEWAY_BINARY_DIR,
              "--config-settings=cmake.define.CMAKE_CXX_FLAGS_RELEASE=-O1", archive},
             program, std::chrono::seconds(600));
  ASSERT_EQ(wheel.code, 0) << wheel;
  const RunResult pip = python(
      {"-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", "--no-index",
       "--find-links", folder / "wheels", "--target", folder / "site", "leeway"},
      program, std::chrono::seconds(300));
  ASSERT_EQ(pip.code, 0) << pip;
  const RunResult used = run_program(
      {"PYTHONPATH=" + (folder / "site"), "LEEWAY_OPS=", program, "-c",
       "import leeway, torch\n"
       "pi = torch.zeros(4, requires_grad=True)\n"
       "loss, _ = leeway.policy_loss(pi, rollout=torch.zeros(4), advantages=torch.ones(4),\n"
       "                             cu_seqlens=torch.tensor([0, 4]))\n"
       "loss.backward()\n"
       "print(leeway.__file__.startswith('" +
           folder.path().string() + "'), loss.item(), pi.grad.tolist())"},
      {.directory = folder / "site", .time_limit = std::chrono::seconds(120), .program = "env"});
  EXPECT_EQ(used.out, "True -1.0 [-0.25, -0.25, -0.25, -0.25]\n") << used;
}

TEST(PythonPackage, AloneItSaysWhereItsSourcesAre) {
  const auto [program, skip] = trainer_packages();
  if (!skip.empty()) GTEST_SKIP() << skip;
  ASSERT_FALSE(program.empty());
  const TempFolder folder;
  const std::string package = copy_of_package(folder);
  const RunResult sdist = python({"-c", kMakeSdist, package, folder.path().string()}, program);
  EXPECT_NE(sdist.code, 0);
  EXPECT_TRUE(contains(sdist.err, "where it lies in a checkout of Leeway")) << sdist;
  const RunResult wheel =
      python({"-m", "pip", "wheel", "--disable-pip-version-check", "--no-build-isolation",
              "--no-deps", "--no-index", "--wheel-dir", folder / "wheels", package},
             program, std::chrono::seconds(300));
  EXPECT_NE(wheel.code, 0);
  EXPECT_TRUE(contains(wheel.out + wheel.err, "There are no C++ sources of Leeway at")) << wheel;
}

}  // namespace
}  // namespace leeway
