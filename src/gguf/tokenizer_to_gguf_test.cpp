// Tokenizers through GGUF metadata and back.

#include "gguf/tokenizer_to_gguf.h"

#include <gtest/gtest.h>

#include <map>

#include "base/files.h"
#include "base/rng.h"
#include "gguf/test_gguf.h"
#include "gguf/tokenizer_from_gguf.h"
#include "text/test_tokenizers.h"
#include "text/tokenizer.h"

namespace leeway {
namespace {

using testing::expect_refused;
using testing::TestFolder;

FolderTokenizer through_file(const TestFolder& folder, const ModelConfig& config,
                             std::vector<std::pair<std::string, GgufValue>> metadata) {
  GgufPlan plan{.metadata = std::move(metadata)};
  testing::write_gguf(folder.at("tokenizer.gguf"), plan);
  return tokenizer_of_gguf(GgufFile(folder.at("tokenizer.gguf")), config);
}

std::string varied_text(Rng& rng) {
  static const std::vector<std::string> kParts = {"the ",
                                                  " The",
                                                  "don't",
                                                  "WE'LL",
                                                  " 12345",
                                                  "3.14",
                                                  "\n\n",
                                                  "\r\n",
                                                  "\t ",
                                                  "   x",
                                                  "\xC3\x9C"
                                                  "ber",
                                                  "\xE6\x97\xA5\xE6\x9C\xAC",
                                                  "\xF0\x9F\x8E\x89",
                                                  "e\xCC\x81",
                                                  "<|end|>",
                                                  "<think>",
                                                  "_snake_case",
                                                  "CamelCase",
                                                  "!?...",
                                                  "\xC2\xB2",
                                                  "\xE2\x85\xA7",
                                                  " ",
                                                  "a"};
  std::string text;
  for (uint64_t n = 1 + rng.below(8); n > 0; --n) text += kParts[rng.below(kParts.size())];
  return text;
}

TEST(GgufTokenizer, EveryRuleForWordsComesBack) {
  const TestFolder folder;
  const ModelConfig config = testing::gguf_config(Family::llama);
  for (const char* pre : {"gpt-2", "smollm", "llama-bpe", "qwen2", "starcoder", "llama3"}) {
    SCOPED_TRACE(pre);
    const FolderTokenizer first =
        through_file(folder, config, testing::small_gguf_tokenizer(config.vocab_size, pre));
    folder.write("tokenizer.json", first.tokenizer_json);
    folder.write("tokenizer_config.json", first.tokenizer_config_json);
    folder.write("generation_config.json", first.generation_config_json);
    const auto metadata = gguf_tokenizer_of(folder.path(), config);
    const FolderTokenizer second = through_file(folder, config, metadata);
    EXPECT_EQ(second.tokenizer_json, first.tokenizer_json);
    EXPECT_EQ(second.tokenizer_config_json, first.tokenizer_config_json);
    EXPECT_EQ(second.generation_config_json, first.generation_config_json);
    EXPECT_EQ(second.eos_token_id, std::vector<int32_t>{258});
  }
}

TEST(GgufTokenizer, TokensKeepTheirKinds) {
  const TestFolder folder;
  const ModelConfig config = testing::gguf_config(Family::llama);
  const FolderTokenizer made =
      through_file(folder, config, testing::small_gguf_tokenizer(config.vocab_size));
  const auto tokenizer = parse_tokenizer("tokenizer.json", made.tokenizer_json);
  EXPECT_EQ(tokenizer->vocab_size(), 260) << "fillers are no tokens";
  EXPECT_TRUE(tokenizer->is_special(258));
  EXPECT_FALSE(tokenizer->is_special(259));
  using Ids = std::vector<int32_t>;
  EXPECT_EQ(tokenizer->encode("the<|end|><think>", SpecialTokens::recognise), (Ids{257, 258, 259}));
  EXPECT_EQ(tokenizer->encode("<think>", SpecialTokens::as_text), Ids{259});
  EXPECT_EQ(tokenizer->encode("<|end|>", SpecialTokens::as_text).size(), 7u);
}

TEST(GgufTokenizer, TheBeginTokenIsPutWhereTheFileSaysSo) {
  const TestFolder folder;
  const ModelConfig config = testing::gguf_config(Family::llama);
  const auto begins = [&](const char* pre, std::optional<bool> said) {
    auto metadata = testing::small_gguf_tokenizer(config.vocab_size, pre);
    metadata.emplace_back("tokenizer.ggml.bos_token_id", uint32_t{258});
    if (said) metadata.emplace_back("tokenizer.ggml.add_bos_token", *said);
    const FolderTokenizer made = through_file(folder, config, metadata);
    const bool in_config =
        made.tokenizer_config_json.find("\"add_bos_token\": true") != std::string::npos;
    EXPECT_EQ(made.tokenizer_json.find("TemplateProcessing") != std::string::npos, in_config);
    EXPECT_EQ(made.bos_token_id, 258);
    // And back, with and without the settings.
    folder.write("tokenizer.json", made.tokenizer_json);
    folder.write("tokenizer_config.json", R"({"bos_token": {"content": "<|end|>"}})");
    for (const auto& [key, value] : gguf_tokenizer_of(folder.path(), config)) {
      if (key != "tokenizer.ggml.add_bos_token") continue;
      EXPECT_EQ(std::get<bool>(value), in_config);
    }
    return in_config;
  };
  EXPECT_FALSE(begins("smollm", std::nullopt));
  EXPECT_TRUE(begins("smollm", true));
  EXPECT_TRUE(begins("llama-bpe", std::nullopt));
  EXPECT_FALSE(begins("llama-bpe", false));
}

TEST(GgufTokenizer, ARuleWithoutANameIsRefused) {
  const TestFolder folder;
  const ModelConfig config = testing::gguf_config(Family::llama);
  std::string json =
      through_file(folder, config, testing::small_gguf_tokenizer(config.vocab_size)).tokenizer_json;
  const std::string before = "\"individual_digits\": true";
  json.replace(json.find(before), before.size(), "\"individual_digits\": false");
  folder.write("tokenizer.json", json);
  expect_refused([&] { gguf_tokenizer_of(folder.path(), config); },
                 {"tokenizer.json: pre_tokenizer", "smollm"});
}

TEST(GgufTokenizer, TheTemplateMayLieInAFileOrAList) {
  const TestFolder folder;
  const ModelConfig config = testing::gguf_config(Family::llama);
  folder.write("tokenizer.json",
               through_file(folder, config, testing::small_gguf_tokenizer(config.vocab_size))
                   .tokenizer_json);
  const auto found = [&] {
    for (const auto& [key, value] : gguf_tokenizer_of(folder.path(), config)) {
      if (key == "tokenizer.chat_template") return std::get<std::string>(value);
    }
    return std::string("none");
  };
  EXPECT_EQ(found(), "none");
  folder.write("tokenizer_config.json",
               R"({"chat_template": [{"name": "rag", "template": "r"},
                   {"name": "default", "template": "d"}]})");
  EXPECT_EQ(found(), "d");
  folder.write("chat_template.jinja", "file");
  EXPECT_EQ(found(), "file");
}

// The real vocabularies of Qwen3 and Llama 3.1 encode the same after the journey.
TEST(GgufTokenizer, RealTokenizersComeBack) {
  for (const auto& [name, vocab_size, pre] :
       std::vector<std::tuple<std::string, int64_t, std::string>>{
           {"qwen3", 151936, "qwen2"}, {"llama3", 128256, "llama-bpe"}}) {
    const std::optional<std::string> path = testing::real_tokenizer(name);
    if (!path) GTEST_SKIP() << testing::kNoRealTokenizers;
    const TestFolder folder;
    ModelConfig config = testing::gguf_config(Family::llama);
    config.vocab_size = vocab_size;
    folder.write("tokenizer.json", read_file(*path));
    const auto metadata = gguf_tokenizer_of(folder.path(), config);
    EXPECT_EQ(std::get<std::string>(metadata[1].second), pre);
    const FolderTokenizer made = through_file(folder, config, metadata);
    const auto before = load_tokenizer(*path);
    const auto after = parse_tokenizer("made", made.tokenizer_json);
    EXPECT_EQ(after->vocab_size(), before->vocab_size());
    Rng rng(5);
    for (int i = 0; i < 500; ++i) {
      const std::string text = varied_text(rng) + (i % 5 == 0 ? "<|im_end|><|eot_id|>" : "");
      for (const auto special : {SpecialTokens::recognise, SpecialTokens::as_text}) {
        ASSERT_EQ(after->encode(text, special), before->encode(text, special)) << text;
      }
    }
  }
}

}  // namespace
}  // namespace leeway
