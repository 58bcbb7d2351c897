// Adapters in both directions between leeway and PyPI's peft, over a model of each family.

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>

#include "base/files.h"
#include "cli_helpers.h"
#include "python_packages.h"

namespace leeway {
namespace {

constexpr const char* kConfig = R"(output_dir = "run"
[model]
path = "base"
tokenizer = "byte"
[model.lora]
rank = 4
alpha = 8
[sft]
max_steps = 4
learning_rate = 3e-2
[rollout]
stop = "\n"
[[environment]]
name = "sort"
)";

constexpr const char* kTokens = R"({"tokens": [[97, 98, 99, 61, 97, 98, 99, 10], [1, 2, 3]]})";

double largest_difference(const Json& a, const Json& b) {
  double worst = 0.0;
  EXPECT_EQ(a.Size(), b.Size());
  for (rapidjson::SizeType s = 0; s < a.Size(); ++s) {
    EXPECT_EQ(a[s].Size(), b[s].Size());
    for (rapidjson::SizeType t = 1; t < a[s].Size(); ++t) {
      worst = std::max(worst, std::abs(a[s][t].GetDouble() - b[s][t].GetDouble()));
    }
  }
  return worst;
}

TEST(Peft, ReadsOurAdaptersAndWeReadItsOwn) {
  const auto [program, skip] =
      python_packages("python_peft", {"torch==2.13.0", "transformers==5.23.0", "peft==0.21.2"});
  if (!skip.empty()) GTEST_SKIP() << skip;
  ASSERT_FALSE(program.empty());
  for (const std::string family : {"llama", "qwen2", "qwen3"}) {
    const TempFolder folder;
    const auto run = [&](const std::vector<std::string>& args) {
      const RunResult result = run_program(args, {.directory = folder.path().string()});
      EXPECT_EQ(result.code, 0) << family << ": " << result;
      return result.out;
    };
    const std::string name = family == "llama" ? "Llama" : family == "qwen2" ? "Qwen2" : "Qwen3";
    std::ofstream(folder / "config.json")
        << R"({"architectures": [")" << name << R"(ForCausalLM"], "model_type": ")" << family
        << R"(", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
             "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
             "max_position_embeddings": 64, "vocab_size": 128, "rms_norm_eps": 1e-6,
             "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": false})";
    std::ofstream(folder / "run.toml") << kConfig;
    std::ofstream(folder / "tokens.json") << kTokens;
    run({"init", "--config", "config.json", "--output", "base"});
    run({"sft", "run.toml"});
    const std::string adapter = "run/weights/step_4";
    const RunResult peft = run_program(
        {LEEWAY_SOURCE_DIR "/tests/python/peft_test.py", "base", adapter, "tokens.json", "made"},
        {.directory = folder.path().string(),
         .time_limit = std::chrono::seconds(300),
         .program = program});
    ASSERT_EQ(peft.code, 0) << peft;
    const Document theirs = json_of(peft.out);
    const auto ours = [&](const std::vector<std::string>& of) {
      std::vector<std::string> args = {"logprobs", "--tokens", "tokens.json"};
      args.insert(args.end(), of.begin(), of.end());
      return json_of(run(args));
    };
    // float32 on both sides, in different orders of summation.
    const Document base = ours({"--model", "base"});
    const Document read = ours({"--model", "base", "--adapter", adapter});
    EXPECT_LT(largest_difference(read["logprobs"], theirs["read"]), 2e-5) << family;
    EXPECT_GT(largest_difference(read["logprobs"], base["logprobs"]), 1e-2) << family;
    const Document made = ours({"--model", "base", "--adapter", "made"});
    EXPECT_LT(largest_difference(made["logprobs"], theirs["made"]), 2e-5) << family;
    run({"merge", "base", "made", "merged"});
    const Document merged = ours({"--model", "merged"});
    EXPECT_LT(largest_difference(merged["logprobs"], theirs["merged"]), 2e-5) << family;
  }
}

}  // namespace
}  // namespace leeway
