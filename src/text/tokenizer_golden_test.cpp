// Encodings and decodings by the reference implementation for real vocabularies.

#include <gtest/gtest.h>

#include "base/files.h"
#include "base/json.h"
#include "text/test_tokenizers.h"
#include "text/tokenizer.h"

namespace leeway {
namespace {

class TokenizerGolden : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    const std::optional<std::string> path = testing::real_tokenizer(GetParam());
    if (!path) GTEST_SKIP() << testing::kNoRealTokenizers;
    tokenizer_ = load_tokenizer(*path);
    document_ = parse_json("tokenizer_encodings.json",
                           read_file(LEEWAY_SOURCE_DIR "/tests/data/tokenizer_encodings.json"));
    ASSERT_TRUE(document_.HasMember(GetParam()));
    ASSERT_GE(document_[GetParam()].Size(), 130u);
  }

  static std::string text_of(const rapidjson::Value& value) {
    return {value.GetString(), value.GetStringLength()};
  }

  static std::vector<int32_t> ids_of(const rapidjson::Value& value) {
    std::vector<int32_t> ids;
    for (const auto& id : value.GetArray()) ids.push_back(id.GetInt());
    return ids;
  }

  std::unique_ptr<Tokenizer> tokenizer_;
  rapidjson::Document document_;
};

TEST_P(TokenizerGolden, encodes_as_the_reference) {
  for (const auto& golden : document_[GetParam()].GetArray()) {
    const std::string text = text_of(golden["text"]);
    EXPECT_EQ(tokenizer_->encode(text, SpecialTokens::recognise), ids_of(golden["ids"])) << text;
  }
}

TEST_P(TokenizerGolden, decodes_as_the_reference) {
  for (const auto& golden : document_[GetParam()].GetArray()) {
    EXPECT_EQ(tokenizer_->decode(ids_of(golden["ids"])), text_of(golden["decoded"]));
  }
}

TEST_P(TokenizerGolden, decodes_one_token_at_a_time) {
  for (const auto& golden : document_[GetParam()].GetArray()) {
    IncrementalDecoder decoder(*tokenizer_);
    std::string text;
    for (const int32_t id : ids_of(golden["ids"])) text += decoder.push(id);
    EXPECT_EQ(text + decoder.finish(), text_of(golden["decoded"]));
  }
}

TEST_P(TokenizerGolden, text_never_becomes_a_special_token) {
  for (int32_t id = 0; id < tokenizer_->vocab_size(); ++id) {
    if (!tokenizer_->is_special(id)) continue;
    const std::string spelled = tokenizer_->decode(std::span(&id, 1));
    EXPECT_EQ(tokenizer_->token_id(spelled), id);
    EXPECT_EQ(tokenizer_->encode(spelled, SpecialTokens::recognise), std::vector{id});
    const std::vector<int32_t> as_text = tokenizer_->encode(spelled, SpecialTokens::as_text);
    EXPECT_GT(as_text.size(), 1u);
    for (const int32_t part : as_text) EXPECT_FALSE(tokenizer_->is_special(part)) << spelled;
    EXPECT_EQ(tokenizer_->decode(as_text), spelled);
  }
}

TEST_P(TokenizerGolden, every_single_byte_round_trips) {
  for (int byte = 0; byte < 256; ++byte) {
    const std::string text(1, static_cast<char>(byte));
    EXPECT_EQ(tokenizer_->decode(tokenizer_->encode(text, SpecialTokens::as_text)), text);
  }
}

// Merging by repeated scans would take hours here.
TEST_P(TokenizerGolden, a_megabyte_without_a_space_is_no_trouble) {
  for (const char* unit :
       {"a", "ab", "\xE4\xB8\xAD", "\xCC\x81\xCC\xA3", " ", "\n", "<|", "!", "\xFF"}) {
    std::string text;
    while (text.size() < (size_t{1} << 20)) text += unit;
    const auto ids = tokenizer_->encode(text, SpecialTokens::recognise);
    if (std::string_view(unit).find('\xCC') == std::string_view::npos) {
      EXPECT_EQ(tokenizer_->decode(ids), text);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Families, TokenizerGolden, ::testing::Values("qwen3", "llama3"),
                         [](const auto& family) { return std::string(family.param); });

}  // namespace
}  // namespace leeway
