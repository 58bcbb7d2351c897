// python/leeway_env: its own tests against a stand-in for leeway, real packages in a virtual
// environment, and the example whose context is compacted.

#include <gtest/gtest.h>

#include <algorithm>

#include "base/files.h"
#include "cli_helpers.h"

namespace leeway {
namespace {

namespace fs = std::filesystem;

constexpr const char* kTests = LEEWAY_SOURCE_DIR "/tests/python/";

RunResult python(const std::vector<std::string>& args, const std::string& program = "python3",
                 std::chrono::seconds limit = std::chrono::seconds(120)) {
  return run_program(args, {.time_limit = limit, .program = program});
}

bool have_python() { return python({"-c", "1"}).code == 0; }

TEST(PythonEnv, TheTestsOfTheProtocolPass) {
  if (!have_python()) GTEST_SKIP() << "there is no python3";
  const RunResult result =
      python({std::string(kTests) + "protocol_test.py"}, "python3", std::chrono::seconds(600));
  EXPECT_EQ(result.code, 0) << result;
}

// True if pip could not reach the packages, which is not the tests' fault.
bool is_network(const RunResult& pip) {
  if (pip.code == -SIGKILL) return true;  // beyond its time
  for (const char* words :
       {"onnection", "imed out", "imeout", "emporary failure", "nreachable", "HTTP error"}) {
    if (contains(pip.err, words)) return true;
  }
  return false;
}

// The environment lies in the build folder and is made once. 0.3.1 is the last version of verifiers
// with v0 environments.
TEST(PythonEnv, EnvironmentsOfRealPackagesRun) {
  if (!have_python()) GTEST_SKIP() << "there is no python3";
  const fs::path folder = LEEWAY_BINARY_DIR "/python_packages";
  const std::string program = folder / "bin/python";
  const std::vector<std::string> packages = {"reasoning-gym==0.1.25", "verifiers==0.3.1"};
  const fs::path stamp = folder / ("has_" + packages[0] + "_" + packages[1]);
  if (!fs::exists(stamp)) {
    fs::remove_all(folder);
    const RunResult made = python({"-m", "venv", folder.string()});
    ASSERT_EQ(made.code, 0) << "python3-venv is needed: " << made;
    std::vector<std::string> args = {"-m",
                                     "pip",
                                     "install",
                                     "-q",
                                     "--no-compile",
                                     "--disable-pip-version-check",
                                     "--prefer-binary",
                                     "--timeout=15",
                                     "--retries=1"};
    args.insert(args.end(), packages.begin(), packages.end());
    const RunResult pip = python(args, program, std::chrono::seconds(240));
    if (pip.code != 0 && is_network(pip)) {
      GTEST_SKIP() << "needs the network: packages for Python could not be fetched";
    }
    ASSERT_EQ(pip.code, 0) << pip;
    write_file_atomically(stamp, "");
  }
  const RunResult result =
      python({std::string(kTests) + "packages_test.py"}, program, std::chrono::seconds(1200));
  EXPECT_EQ(result.code, 0) << result.err.substr(result.err.size() -
                                                 std::min<size_t>(result.err.size(), 6000));
}

// Two compactions per rollout: a replaced context opens a sample, and so does a request for which
// past thinking was stripped.
TEST(PythonEnv, TheCompactingAgentHasOneOrTwoSamplesPerCompaction) {
  if (!have_python()) GTEST_SKIP() << "there is no python3";
  const TempFolder folder;
  for (const bool strip : {false, true}) {
    const std::string run = folder / (strip ? "stripped" : "kept");
    const std::string agent = "PYTHONPATH=python python3 examples/06_compaction/agent.py";
    const RunResult result = run_program(
        {"train", "examples/06_compaction/config.toml", "--json", "--set", "output_dir=" + run,
         "--set", "sft.max_steps=100", "--set", "trainer.max_steps=2", "--set",
         "orchestrator.prompts_per_batch=4", "--set", "orchestrator.group_size=4", "--set",
         "eval.prompts=4", "--set", "environment.0.command=" + agent + (strip ? " --strip" : "")},
        {.directory = LEEWAY_SOURCE_DIR, .time_limit = std::chrono::seconds(450)});
    ASSERT_EQ(result.code, 0) << result;
    const std::vector<std::string> rows = lines_of(read_file(run + "/metrics.jsonl"));
    ASSERT_EQ(rows.size(), 2u);
    for (const std::string& line : rows) {
      const Document row = json_of(line);
      EXPECT_EQ(row["samples_per_rollout"].GetDouble(), strip ? 5.0 : 3.0);
      EXPECT_EQ(row["turns/all/mean"].GetDouble(), 6.0);
      EXPECT_EQ(row["prefix_breaks/all"].GetDouble(), 16.0 * (strip ? 4 : 2));
      EXPECT_EQ(row.HasMember("prefix_breaks/sampled_tokens_changed"), strip);
    }
  }
}

}  // namespace
}  // namespace leeway
