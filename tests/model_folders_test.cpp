// Model folders, adapters and GGUF files that cannot be used: every command refuses them before it
// does anything, and says what is wrong with which file.

#include <gtest/gtest.h>

#include "base/files.h"
#include "base/json.h"
#include "base/utf8.h"
#include "cli_helpers.h"
#include "text/byte_level.h"

namespace leeway {
namespace {

namespace fs = std::filesystem;

const std::string kQwen = LEEWAY_SOURCE_DIR "/tests/data/hf/qwen3-tied";  // vocab_size = 320
const std::string kLlama = LEEWAY_SOURCE_DIR "/tests/data/hf/llama3-rope";
const std::string kTokens = LEEWAY_SOURCE_DIR "/examples/tokens.json";

std::string run_of(const TempFolder& folder, const std::string& model,
                   const std::string& more = "") {
  return folder.write("run.toml", "output_dir = \"" + (folder / "run") + "\"\n[model]\npath = \"" +
                                      model + "\"\n" + more +
                                      "[rollout]\nstop = \"\\n\"\nmax_new_tokens = 4\n"
                                      "[trainer]\nmax_steps = 1\n"
                                      "[orchestrator]\nprompts_per_batch = 2\ngroup_size = 2\n"
                                      "[eval]\nprompts = 2\n"
                                      "[[environment]]\nname = \"sort\"\n");
}

TEST(ModelFolder, WithoutATokenizerIsForTokenIdsAlone) {
  const TempFolder folder;
  const std::vector<std::string> words = {kQwen + "/tokenizer.json: there is no such file",
                                          "turns text into tokens"};
  expect_mistake(run_program({"train", run_of(folder, kQwen)}), words);
  EXPECT_FALSE(fs::exists(folder / "run"));
  expect_mistake(run_program({"eval", run_of(folder, kQwen)}), words);
  expect_mistake(run_program({"generate", kQwen, "--prompt", "a"}), words);
  expect_mistake(run_program({"logprobs", kQwen, "--text", "a"}), words);
  EXPECT_EQ(run_program({"logprobs", kQwen, "--tokens", kTokens}).code, 0);
}

TEST(ModelFolder, WithTokenizerIdsBeyondItsWeightsIsRefused) {
  const TempFolder folder;
  const std::string model = folder / "model";
  fs::copy(kQwen, model);
  JsonWriter vocab;
  vocab.begin_object();
  for (int byte = 0; byte < 256; ++byte) {
    std::string spelling;
    append_utf8(spelling, byte_level_code_point(static_cast<uint8_t>(byte)));
    vocab.key(spelling).value(byte == 'b' ? 320.0 : byte);
  }
  write_file_atomically(model + "/tokenizer.json",
                        R"({"model": {"type": "BPE", "merges": [], "vocab": )" +
                            vocab.end_object().text() +
                            R"(}, "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false},
                                "decoder": {"type": "ByteLevel"}})");
  const std::vector<std::string> words = {"tokenizer.json: has ids up to 320", "vocab_size = 320",
                                          "the tokenizer belongs to another model"};
  expect_mistake(run_program({"train", run_of(folder, model)}), words);
  EXPECT_FALSE(fs::exists(folder / "run"));
  expect_mistake(run_program({"eval", run_of(folder, model)}), words);
  expect_mistake(run_program({"serve", model, "--port", "0"}), words);
  expect_mistake(run_program({"convert", model, folder / "out.gguf"}), words);
  expect_mistake(run_program({"generate", model, "--prompt", "b"}),
                 {"the tokenizer's token b has the id 320", "the model's ids are 0 to 319"});
  expect_mistake(run_program({"logprobs", model, "--text", "b"}), {"has the id 320"});
}

// Fits as weights, but not with gradients and moments.
TEST(ModelFolder, TooLargeForMemoryIsRefusedBeforeAnythingIsAllocated) {
  const TempFolder folder;
  const std::string config = folder.write(
      "run.toml", "output_dir = \"" + (folder / "run") + "\"\n[model]\ntokenizer = \"byte\"\n" +
                      "vocab_size = 128\nhidden_size = 1048576\nintermediate_size = 1048576\n"
                      "[rollout]\nstop = \"\\n\"\n[[environment]]\nname = \"sort\"\n");
  const RunResult result = run_program({"train", config});
  EXPECT_EQ(result.code, 3) << result;
  for (const char* words : {"no memory for training", "GiB are needed (weights, gradient and two",
                            "GiB are available", "[model.lora]"}) {
    EXPECT_TRUE(contains(result.err, words)) << result;
  }
  EXPECT_FALSE(fs::exists(folder / "run"));
}

TEST(ModelFolder, AnAdapterForAnotherBaseIsRefusedWithBoth) {
  const TempFolder folder;
  const std::string byte = "tokenizer = \"byte\"\n";
  const RunResult made =
      run_program({"train", run_of(folder, kQwen, byte + "[model.lora]\nrank = 2\n")},
                  {.time_limit = std::chrono::seconds(120)});
  ASSERT_EQ(made.code, 0) << made;
  const std::string adapter = folder / "run/weights/step_1";
  const std::vector<std::string> words = {
      "q_proj.lora_A.weight is [2, 64], not [2, 96]", "belongs to another base",
      "the base here is a llama with num_hidden_layers = 2, hidden_size = 96",
      "the adapter was made for " + kQwen};
  for (std::vector<std::string> args : std::vector<std::vector<std::string>>{
           {"generate", kLlama, "--adapter", adapter, "--tokens", kTokens, "--max-new-tokens", "1"},
           {"logprobs", kLlama, "--adapter", adapter, "--tokens", kTokens},
           {"serve", kLlama, "--adapter", adapter, "--port", "0"},
           {"merge", kLlama, adapter, folder / "merged"},
           {"eval", run_of(folder, kLlama, byte), "--adapter", adapter}}) {
    expect_mistake(run_program(args), words);
  }
  EXPECT_FALSE(fs::exists(folder / "merged"));
}

TEST(ModelFolder, AGgufFileThatCannotBeReadIsRefused) {
  const TempFolder folder;
  const auto number = [](uint64_t value, size_t bytes) {
    return std::string(reinterpret_cast<const char*>(&value), bytes);
  };
  const auto text = [&](const std::string& value) { return number(value.size(), 8) + value; };
  const std::string header = "GGUF" + number(3, 4) + number(0, 8);
  const std::string mamba =
      folder.write("mamba.gguf", header + number(1, 8) + text("general.architecture") +
                                     number(8, 4) + text("mamba") + std::string(64, '\0'));
  expect_mistake(run_program({"convert", mamba, folder / "out"}),
                 {mamba, "general.architecture = \"mamba\"", "not supported", "llama"});
  EXPECT_FALSE(fs::exists(folder / "out"));
  expect_mistake(run_program({"generate", mamba, "--prompt", "a"}), {"leeway convert"});
  const std::string missing = folder / "missing.gguf";
  expect_mistake(run_program({"generate", missing, "--prompt", "a"}), {missing, "no such file"});
  const std::string other = folder.write("text.gguf", "no GGUF at all");
  expect_mistake(run_program({"convert", other, folder / "out"}), {"does not begin with GGUF"});
}

}  // namespace
}  // namespace leeway
