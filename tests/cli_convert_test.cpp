// `leeway convert` end to end, and models that do not fit their tokenizer or the machine.

#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include "base/files.h"
#include "cli_helpers.h"
#include "gguf/test_gguf.h"

namespace leeway {
namespace {

namespace fs = std::filesystem;

const std::string kModel = LEEWAY_SOURCE_DIR "/tests/data/hf/qwen3-tied";

std::string small_file(const TempFolder& folder) {
  const std::string path = folder / "small.gguf";
  testing::write_gguf(path, testing::gguf_plan(testing::gguf_config(Family::llama)));
  return path;
}

TEST(ConvertCommand, AFileBecomesAFolderThatTheOtherCommandsUse) {
  const TempFolder folder;
  const RunResult result = run_program({"convert", small_file(folder), folder / "model", "--json"});
  ASSERT_EQ(result.code, 0) << result;
  const Document json = json_of(result.out);
  EXPECT_STREQ(json["architecture"].GetString(), "llama");
  EXPECT_GT(json["types"]["F32"].GetInt(), 10);
  EXPECT_EQ(json["warnings"].Size(), 0u);
  const RunResult scored =
      run_program({"logprobs", folder / "model", "--text", "the end", "--json"});
  ASSERT_EQ(scored.code, 0) << scored;
  EXPECT_EQ(json_of(scored.out)["tokens"].Size(), 5u) << "the, space, e, n, d";

  const RunResult back =
      run_program({"convert", folder / "model", folder / "back.gguf", "--type", "q8_0"});
  ASSERT_EQ(back.code, 0) << back;
  EXPECT_EQ(back.out, "") << "the result is the file";
  EXPECT_TRUE(contains(back.err, "Q8_0")) << back;
}

TEST(ConvertCommand, MistakesAreNamed) {
  const TempFolder folder;
  const std::string file = small_file(folder), out = folder / "out";
  expect_mistake(run_program({"convert", folder / "none.gguf", out}), {"none.gguf"});
  expect_mistake(run_program({"convert", kModel, out}), {out, ".gguf"});
  expect_mistake(run_program({"convert", file, folder / "b.gguf"}), {"b.gguf", "already"});
  expect_mistake(run_program({"convert", file, out, "--type", "f16"}), {"--type", "--dtype"});
  expect_mistake(run_program({"convert", kModel, folder / "b.gguf", "--dtype", "bf16"}),
                 {"--dtype", "--type"});
  expect_mistake(run_program({"convert", LEEWAY_SOURCE_DIR "/README.md", out}),
                 {"README.md: at byte 0"});
  expect_mistake(run_program({"convert", file, folder.path()}), {"not an empty folder"});
  expect_mistake(run_program({"generate", file, "--prompt", "a"}), {file, "leeway convert"});
  EXPECT_FALSE(fs::exists(out));
}

// Both numbers are said, when the run is set up.
TEST(ModelFolder, ATokenizerWithMoreIdsThanTheWeightsIsRefused) {
  const TempFolder folder;
  const std::string model = folder / "model";
  ASSERT_EQ(run_program({"convert", small_file(folder), model}).code, 0);
  ModelConfig config = testing::gguf_config(Family::llama);
  config.vocab_size = 250;
  save_parameters(testing::small_parameters(config), model);
  folder.write("questions.jsonl", "{\"prompt\": \"a\", \"answer\": \"b\"}\n");
  const std::string path = folder.write("config.toml", "[model]\npath = \"" + model + R"("
[trainer]
max_steps = 1
[rollout]
max_new_tokens = 4
[[environment]]
name = "jsonl"
data = "questions.jsonl"
verifier = "exact"
)");
  expect_mistake(run_program({"train", path, "--set", "output_dir=" + (folder / "run")}),
                 {model + "/tokenizer.json", "259", "vocab_size = 250"});
}

TEST(ModelFolder, WithoutATokenizerIsRefusedWhereTextIsNeeded) {
  const TempFolder folder;
  const std::string model = folder / "model";
  ASSERT_EQ(run_program({"convert", small_file(folder), model, "--no-tokenizer"}).code, 0);
  expect_mistake(run_program({"generate", model, "--prompt", "a"}),
                 {model + "/tokenizer.json", "--tokenizer", "--tokens"});
  folder.write("questions.jsonl", "{\"prompt\": \"a\", \"answer\": \"b\"}\n");
  const std::string path = folder.write("config.toml", "[model]\npath = \"" + model + R"("
[trainer]
max_steps = 1
[rollout]
max_new_tokens = 4
[[environment]]
name = "jsonl"
data = "questions.jsonl"
verifier = "exact"
)");
  expect_mistake(run_program({"train", path, "--set", "output_dir=" + (folder / "run")}),
                 {model + "/tokenizer.json", "model.tokenizer"});
}

// Weights of a TiB, of which the file has no bytes: the numbers are said, and nothing is allocated.
TEST(ModelFolder, TooLargeForMemoryIsSaidBeforeItIsRead) {
  const TempFolder folder;
  ModelConfig config = testing::small_config(Family::llama, true);
  config.vocab_size = int64_t{1} << 28;
  config.hidden_size = 1024;
  folder.write("config.json", model_config_json(config));
  std::string header;
  uint64_t end = 0;
  for (const ParameterInfo& info : parameter_table(config)) {
    const uint64_t begin = end;
    end += static_cast<uint64_t>(info.size()) * 2;
    header += fmt::format(
        "{}\"{}\": {{\"dtype\": \"BF16\", \"shape\": [{}], \"data_offsets\": [{}, {}]}}",
        header.empty() ? "{" : ", ", info.name, fmt::join(info.shape, ", "), begin, end);
  }
  const std::string bytes = testing::raw_safetensors(header + "}", "");
  folder.write("model.safetensors", bytes);
  std::error_code failure;
  fs::resize_file(folder / "model.safetensors", bytes.size() + end, failure);
  if (failure) GTEST_SKIP() << "needs a file system with files of a TiB: " << failure.message();
  const RunResult result =
      run_program({"generate", folder.path(), "--tokenizer", "byte", "--prompt", "a"});
  EXPECT_EQ(result.code, 3) << result;
  EXPECT_TRUE(contains(result.err, "no memory for 2748") &&
              contains(result.err, "1024.0 GiB in float32 are needed") &&
              contains(result.err, "GiB are available"))
      << result;
}

}  // namespace
}  // namespace leeway
