#include "generate/model_text.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "base/json.h"
#include "base/test_folder.h"
#include "leeway/error.h"
#include "text/byte_level.h"
#include "text/test_tokenizers.h"

namespace leeway {
namespace {

ModelConfig config_of(int64_t vocab_size) {
  ModelConfig config;
  config.vocab_size = vocab_size;
  config.eos_token_id = {3};
  return config;
}

std::string problem_of(const ModelTextOptions& options, int64_t vocab_size = 300) {
  try {
    load_model_text(options, config_of(vocab_size));
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// A tokenizer.json whose ids 0 to 255 are the bytes, with `more` among its members.
std::string byte_vocabulary(const std::string& more) {
  JsonWriter vocab;
  vocab.begin_object();
  for (int byte = 0; byte < 256; ++byte) {
    std::string spelling;
    append_utf8(spelling, byte_level_code_point(static_cast<uint8_t>(byte)));
    vocab.key(spelling).value(static_cast<double>(byte));
  }
  return R"({"model": {"type": "BPE", "merges": [], "vocab": )" + vocab.end_object().text() +
         R"(}, "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false},
             "decoder": {"type": "ByteLevel"})" +
         more + "}";
}

class ModelTextTest : public ::testing::Test {
 protected:
  ModelTextTest() { folder_.write("config.json", R"({"model_type": "qwen3"})"); }

  ModelTextOptions options(bool needs_renderer, const std::string& tokenizer = "byte") const {
    return {.folder = folder_.path(), .tokenizer = tokenizer, .needs_renderer = needs_renderer};
  }

  testing::TestFolder folder_;
};

TEST_F(ModelTextTest, EndTokensAreThoseOfEveryFileAndTheRenderer) {
  folder_.write("generation_config.json", R"({"eos_token_id": [3, 5, 70000]})");
  ModelText text = load_model_text(options(false), config_of(300));
  EXPECT_EQ(text.end_ids, (std::vector<int32_t>{3, 5})) << "70000 is no id of the model";
  EXPECT_EQ(text.renderer, nullptr);
  text = load_model_text(options(true), config_of(300));
  EXPECT_STREQ(text.renderer->name(), "qwen3");
  const int32_t end = *text.tokenizer->token_id("<|im_end|>");
  EXPECT_TRUE(std::find(text.end_ids.begin(), text.end_ids.end(), end) != text.end_ids.end());
  EXPECT_GT(text.end_ids.size(), 2u);
}

TEST_F(ModelTextTest, AFolderOfLeewayKnowsItsTokenizerAndRenderer) {
  folder_.write("leeway.json",
                R"({"format": 1, "tokenizer": "byte", "control_tokens": ["<|endoftext|>",
                    "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"],
                    "renderer": {"name": "qwen2.5", "preserve_all_thinking": false,
                    "preserve_thinking_between_tool_calls": false}})");
  const ModelText text = load_model_text(options(true, ""), config_of(300));
  EXPECT_STREQ(text.renderer->name(), "qwen2.5");
  EXPECT_EQ(text.tokenizer->token_id("<|im_start|>"), 257);
  ModelTextOptions automatic = options(true, "");
  automatic.renderer = "auto";
  EXPECT_STREQ(load_model_text(automatic, config_of(300)).renderer->name(), "qwen2.5");
}

TEST_F(ModelTextTest, SaysWhatIsMissing) {
  std::string problem = problem_of(options(false, ""));
  EXPECT_TRUE(has(problem, "/tokenizer.json")) << problem;
  EXPECT_TRUE(has(problem, "--tokens")) << "ids work without it: " << problem;
  ModelTextOptions unknown = options(true);
  unknown.renderer = "qwen2.6";
  problem = problem_of(unknown);
  EXPECT_TRUE(has(problem, "--renderer qwen2.6") && has(problem, "did you mean qwen2.5?"))
      << problem;
  folder_.write("config.json", R"({"model_type": "mamba"})");
  problem = problem_of(options(true));
  EXPECT_TRUE(has(problem, "mamba") || has(problem, "config.json")) << problem;
  folder_.write("tokenizer_config.json", R"({"eos_token": 1})");
  EXPECT_TRUE(has(problem_of(options(false)), "eos_token = 1"));
}

// A byte-level vocabulary without any control token.
TEST_F(ModelTextTest, ATokenizerWithoutTheRenderersTokensIsRefusedByName) {
  folder_.write("tokenizer.json", byte_vocabulary(""));
  const std::string problem = problem_of(options(true, ""));
  EXPECT_TRUE(has(problem, "<|im_start|>") || has(problem, "<|im_end|>")) << problem;
  EXPECT_TRUE(has(problem, "--prompt")) << problem;
  EXPECT_EQ(problem_of(options(false, "")), "");
}

TEST_F(ModelTextTest, APlainPromptBeginsAsTheTokenizerConfigSays) {
  folder_.write("tokenizer.json",
                byte_vocabulary(
                    R"(, "added_tokens": [{"id": 256, "content": "<s>", "special": true}],
                       "post_processor": {"single": [{"SpecialToken": {"id": "<s>"}}]})"));
  const auto prompt = [&](const std::string& config, const std::string& given) {
    folder_.write("tokenizer_config.json", config);
    return plain_prompt(load_model_text(options(false, ""), config_of(300)), "--prompt", given);
  };
  using Ids = std::vector<int32_t>;
  EXPECT_EQ(prompt("{}", "ab"), (Ids{256, 97, 98})) << "by the post_processor";
  EXPECT_EQ(prompt(R"({"add_bos_token": false})", "ab"), (Ids{97, 98}));
  EXPECT_EQ(prompt(R"({"add_bos_token": true, "bos_token": "<s>"})", "ab"), (Ids{256, 97, 98}));
  EXPECT_EQ(prompt("{}", "<s>ab"), (Ids{256, 97, 98})) << "it is there already";
  EXPECT_THROW(prompt("{}", ""), Error);
  EXPECT_THROW(prompt(R"({"add_bos_token": true, "bos_token": "<no>"})", "ab"), Error);
  const ModelText text = load_model_text(options(false), config_of(100));
  EXPECT_THROW(plain_prompt(text, "--prompt", "z"), Error) << "the model has ids 0 to 99";
}

TEST_F(ModelTextTest, RealTokenizersBeginAsTheirModelsExpect) {
  const auto llama = testing::real_tokenizer("llama3"), qwen = testing::real_tokenizer("qwen3");
  if (!llama || !qwen) GTEST_SKIP() << testing::kNoRealTokenizers;
  const ModelText with = load_model_text(options(false, *llama), config_of(200000));
  EXPECT_EQ(with.begin_ids, std::vector<int32_t>{*with.tokenizer->token_id("<|begin_of_text|>")});
  const ModelText without = load_model_text(options(true, *qwen), config_of(200000));
  EXPECT_TRUE(without.begin_ids.empty());
  EXPECT_STREQ(without.renderer->name(), "qwen3");
  EXPECT_TRUE(load_model_text(options(false, *qwen), config_of(200000)).begin_ids.empty());
}

}  // namespace
}  // namespace leeway
