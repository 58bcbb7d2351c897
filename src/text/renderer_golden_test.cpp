// Renderings of the published templates, byte for byte, and the tokens that each family needs.
#include <gtest/gtest.h>

#include <cctype>
#include <cstdio>
#include <fstream>
#include <sstream>

#include "leeway/error.h"
#include "text/messages_json.h"
#include "text/renderers/json_value.h"
#include "text/renderers/toy_tokenizer.h"
#include "text/test_tokenizers.h"

namespace leeway {
namespace {

// By family, made by scripts/render_chat_goldens.
JsonValue goldens() {
  const char* name = "chat_renderings.json";
  std::ifstream file(std::string(LEEWAY_SOURCE_DIR "/tests/data/") + name);
  std::stringstream text;
  text << file.rdbuf();
  return read_json(name, text.str());
}

class RendererGolden : public ::testing::TestWithParam<std::string> {};

TEST_P(RendererGolden, TextAndTokensOfEveryCase) {
  const JsonValue all = goldens();
  const JsonValue* cases = all.find(GetParam());
  ASSERT_TRUE(cases && !cases->items.empty());
  const ToyTokenizer tokenizer;
  const auto renderer = make_renderer(GetParam(), &tokenizer);
  const auto text_only = make_renderer(GetParam(), nullptr);
  int compared = 0;
  for (const JsonValue& item : cases->items) {
    SCOPED_TRACE(item.find("case")->text + " " + to_json(*item.find("options")));
    const RenderRequest request = read_render_request("golden", to_json(item));
    const JsonValue& expected = *item.find("text");
    if (expected.is(JsonValue::Kind::null)) {
      EXPECT_THROW(text_only->render_text(request.messages, request.options), Error);
    } else {
      EXPECT_EQ(text_only->render_text(request.messages, request.options), expected.text);
      const Rendered rendered = renderer->render(request.messages, request.options);
      EXPECT_EQ(rendered.text, expected.text);
      EXPECT_EQ(tokenizer.decode(rendered.ids), expected.text);
      for (const int32_t id : rendered.ids) EXPECT_LT(id, tokenizer.vocab_size());
      // A message of this case spells out tags, which stay text unless the template takes them out.
      if (item.find("case")->text != "thinking_in_content") {
        EXPECT_EQ(rendered.ids, tokenizer.encode(expected.text, SpecialTokens::recognise));
      }
      EXPECT_EQ(rendered.message_index.size(), rendered.ids.size());
      EXPECT_EQ(rendered.sampled.size(), rendered.ids.size());
      EXPECT_EQ(rendered.loss_mask.size(), rendered.ids.size());
    }
    ++compared;
  }
  std::printf("%s: %d golden cases\n", GetParam().c_str(), compared);
}

INSTANTIATE_TEST_SUITE_P(Families, RendererGolden, ::testing::ValuesIn(renderer_names()),
                         [](const auto& tested) {
                           std::string name = tested.param;
                           for (char& c : name) c = std::isalnum(c) ? c : '_';
                           return name;
                         });

// With the vocabulary that a family is used with, where the toy's bytes cannot go wrong.
class RendererRealVocabulary
    : public ::testing::TestWithParam<std::pair<const char*, const char*>> {};

TEST_P(RendererRealVocabulary, TokensSpellTheTextOfEveryCase) {
  const auto [name, vocabulary] = GetParam();
  const std::optional<std::string> path = testing::real_tokenizer(vocabulary);
  if (!path) GTEST_SKIP() << testing::kNoRealTokenizers;
  const std::unique_ptr<Tokenizer> tokenizer = load_tokenizer(*path);
  const auto renderer = make_renderer(name, tokenizer.get());
  const JsonValue all = goldens();
  int compared = 0;
  for (const JsonValue& item : all.find(name)->items) {
    const JsonValue& expected = *item.find("text");
    if (expected.is(JsonValue::Kind::null)) continue;
    SCOPED_TRACE(item.find("case")->text + " " + to_json(*item.find("options")));
    const RenderRequest request = read_render_request("golden", to_json(item));
    const Rendered rendered = renderer->render(request.messages, request.options);
    // Qwen's vocabulary normalizes text, so what is decoded is compared, not the text itself.
    EXPECT_EQ(tokenizer->decode(rendered.ids),
              tokenizer->decode(tokenizer->encode(expected.text, SpecialTokens::recognise)));
    EXPECT_LE(rendered.ids.size(), expected.text.size());
    ++compared;
  }
  EXPECT_GT(compared, 10);
}

INSTANTIATE_TEST_SUITE_P(
    Families, RendererRealVocabulary,
    ::testing::Values(std::pair{"qwen3", "qwen3"}, std::pair{"qwen2.5", "qwen3"},
                      std::pair{"qwen3-coder", "qwen3"}, std::pair{"smollm2", "qwen3"},
                      std::pair{"chatml", "qwen3"}, std::pair{"llama3", "llama3"}),
    [](const auto& tested) {
      std::string name = tested.param.first;
      for (char& c : name) c = std::isalnum(c) ? c : '_';
      return name;
    });

TEST(Renderer, StopTokensAndNames) {
  const ToyTokenizer tokenizer;
  const auto stops = [&](const char* name) {
    std::string text;
    for (const int32_t id : make_renderer(name, &tokenizer)->stop_token_ids()) {
      text += tokenizer.decode({&id, 1});
    }
    return text;
  };
  EXPECT_EQ(stops("qwen3"), "<|im_end|><|endoftext|>");
  EXPECT_EQ(stops("glm4.6"), "<|endoftext|><|user|><|observation|>");
  EXPECT_EQ(stops("llama3"), "<|eot_id|><|end_of_text|><|eom_id|>");
  EXPECT_EQ(stops("kimi-k2-thinking"), "<|im_end|>");
  EXPECT_EQ(stops("gpt-oss"), "<|return|><|call|>");
  EXPECT_EQ(stops("smollm2"), "<|im_end|><|endoftext|>");
  try {
    make_renderer("qwen-3", nullptr);
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("did you mean qwen3?"), std::string::npos);
  }
  const ToyTokenizer bare({"<|im_start|>"});
  EXPECT_THROW(make_renderer("qwen3", &bare), Error);
}

TEST(Renderer, TagsThatTheVocabularyLacksAreText) {
  const ToyTokenizer old({"<|im_start|>", "<|im_end|>", "<tool_call>"});
  const auto renderer = make_renderer("qwen3", &old);
  const Rendered rendered =
      renderer->render({{.role = Role::user, .content = "q"},
                        {.role = Role::assistant, .content = "A", .reasoning = "r"}},
                       {});
  EXPECT_EQ(old.decode(rendered.ids), rendered.text);
  const ParsedResponse response = renderer->parse_response(
      old.encode("<think>\nr\n</think>\n\nA<|im_end|>", SpecialTokens::recognise), {});
  EXPECT_EQ(response.reasoning, "r");
  EXPECT_EQ(response.content, "A");
}

}  // namespace
}  // namespace leeway
