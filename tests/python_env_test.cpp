// python/leeway_env: its own tests against a stand-in for leeway, real packages in a virtual
// environment, and the example whose context is compacted.

#include <gtest/gtest.h>

#include <algorithm>

#include "base/files.h"
#include "cli_helpers.h"
#include "python_packages.h"

namespace leeway {
namespace {

constexpr const char* kTests = LEEWAY_SOURCE_DIR "/tests/python/";

TEST(PythonEnv, TheTestsOfTheProtocolPass) {
  if (!have_python()) GTEST_SKIP() << "there is no python3";
  const RunResult result =
      python({std::string(kTests) + "protocol_test.py"}, "python3", std::chrono::seconds(600));
  EXPECT_EQ(result.code, 0) << result;
}

TEST(PythonEnv, EnvironmentsOfRealPackagesRun) {
  const auto [program, skip] = environment_packages();
  if (!skip.empty()) GTEST_SKIP() << skip;
  ASSERT_FALSE(program.empty());
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
