// Masks, flags, parsing and bridging, which the goldens do not cover.
#include "text/renderer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>

#include "base/rng.h"
#include "leeway/error.h"
#include "text/renderers/json_value.h"
#include "text/renderers/toy_tokenizer.h"

namespace leeway {
namespace {

const ToyTokenizer kTokenizer;
constexpr const char* kTools =
    R"([{"type": "function", "function": {"name": "calc", "parameters": {"type": "object",)"
    R"( "properties": {"s": {"type": "string"}, "n": {"type": "integer"},)"
    R"( "b": {"type": "boolean"}, "o": {"type": "object"}}}, "description": "Computes."}}])";

bool thinks(const std::string& name) { return make_renderer(name, nullptr)->has_thinking(); }
bool has_tools(const std::string& name) { return name != "chatml" && name != "smollm2"; }
// Whether a turn has one call at most, and no text beside it.
bool calls_alone(const std::string& name) { return name == "llama3" || name == "gpt-oss"; }
bool has_ids(const std::string& name) { return name.starts_with("kimi-k2"); }
// Whether the next role's marker ends a turn.
bool has_no_close(const std::string& name) { return name.starts_with("glm4"); }

Message user(std::string text) { return {.role = Role::user, .content = std::move(text)}; }
Message tool(std::string text) { return {.role = Role::tool, .content = std::move(text)}; }
Message assistant(std::string text, std::optional<std::string> reasoning = {}) {
  return {.role = Role::assistant, .content = std::move(text), .reasoning = std::move(reasoning)};
}
Message calling(std::string text, std::string arguments) {
  Message message = assistant(std::move(text));
  message.tool_calls.push_back({"functions.calc:0", "calc", std::move(arguments)});
  return message;
}

std::vector<int32_t> ids_of(std::string_view text) {
  return kTokenizer.encode(text, SpecialTokens::recognise);
}
std::string sampled_text(const Rendered& rendered, int message = -2) {
  std::vector<int32_t> ids;
  for (size_t i = 0; i < rendered.ids.size(); ++i) {
    if (!rendered.sampled[i] || (message != -2 && rendered.message_index[i] != message)) continue;
    ids.push_back(rendered.ids[i]);
  }
  return kTokenizer.decode(ids);
}
std::string sampled(const std::string& family, const std::vector<Message>& messages,
                    const RenderOptions& options = {}) {
  return sampled_text(make_renderer(family, &kTokenizer)->render(messages, options));
}

TEST(RendererMask, HeadersAreNotSampledAndClosesAre) {
  const std::vector<Message> messages = {user("q"), assistant("A", "r"), user("p")};
  EXPECT_EQ(sampled("qwen2.5", messages), "A<|im_end|>");
  EXPECT_EQ(sampled("qwen3", messages), "A<|im_end|>");
  EXPECT_EQ(sampled("llama3", messages), "A<|eot_id|>");
  EXPECT_EQ(sampled("kimi-k2-thinking", messages), "A<|im_end|>");
  // The next role's marker is GLM's stop; the empty block stands for thinking that was dropped.
  EXPECT_EQ(sampled("glm4.6", messages), "\nA<|user|>");
}

TEST(RendererMask, ThinkingIsSampledWhereThePromptDoesNotHoldIt) {
  const std::vector<Message> thought = {user("q"), assistant("A", "r")};
  const std::vector<Message> plain = {user("q"), assistant("A")};
  RenderOptions off;
  off.enable_thinking = false;
  EXPECT_EQ(sampled("qwen3", thought), "<think>\nr\n</think>\n\nA<|im_end|>");
  EXPECT_EQ(sampled("qwen3", plain), "<think>\n\n</think>\n\nA<|im_end|>");
  EXPECT_EQ(sampled("qwen3", plain, off), "A<|im_end|>");
  EXPECT_EQ(sampled("qwen3.5", thought), "r\n</think>\n\nA<|im_end|>");
  EXPECT_EQ(sampled("qwen3.5", plain, off), "A<|im_end|>");
  EXPECT_EQ(sampled("glm4.6", thought), "\n<think>r</think>\nA");
  EXPECT_EQ(sampled("glm4.6", plain, off), "\nA");
}

TEST(RendererMask, APieceAcrossTheBorderIsNotSampled) {
  const Rendered rendered =
      make_renderer("qwen2.5", &kTokenizer)->render({user("q"), assistant("\nA")}, {});
  // "assistant\n" and "\nA" share the token "\n\n".
  EXPECT_EQ(sampled_text(rendered), "A<|im_end|>");
  EXPECT_EQ(kTokenizer.decode(rendered.ids), rendered.text);
}

TEST(RendererMask, WordsNeverBecomeControlTokens) {
  std::string spelled;
  for (const std::string& token : toy_special_tokens()) spelled += token + " ";
  for (const std::string& name : renderer_names()) {
    const auto renderer = make_renderer(name, &kTokenizer);
    const auto count = [&](const std::vector<Message>& messages) {
      const Rendered rendered = renderer->render(messages, {});
      EXPECT_EQ(kTokenizer.decode(rendered.ids), rendered.text) << name;
      return std::count_if(rendered.ids.begin(), rendered.ids.end(),
                           [](int32_t id) { return kTokenizer.is_special(id); });
    };
    const auto conversation = [&](const std::string& text) {
      Message turn = assistant(calls_alone(name) && has_tools(name) ? "" : text);
      if (has_tools(name)) {
        JsonValue arguments{.kind = JsonValue::Kind::object};
        arguments.set("s", JsonValue::of_string(text));
        turn.tool_calls.push_back({"", "calc", to_json(arguments)});
      }
      return std::vector<Message>{user(text), turn, tool(text), assistant(text), user(text)};
    };
    EXPECT_EQ(count(conversation(spelled)), count(conversation("x"))) << name;
  }
}

TEST(RendererFlags, PastThinkingIsKeptOnRequest) {
  const std::vector<Message> messages = {user("a"), assistant("A", "first hm"), user("b"),
                                         assistant("B", "second hm"), user("c")};
  for (const std::string& name : renderer_names()) {
    if (!thinks(name)) {
      EXPECT_THROW(make_renderer(name, nullptr, {.preserve_all_thinking = true}), Error) << name;
      EXPECT_THROW(make_renderer(name, nullptr, {.preserve_thinking_between_tool_calls = true}),
                   Error);
      continue;
    }
    const std::string kept =
        make_renderer(name, nullptr, {.preserve_all_thinking = true})->render_text(messages, {});
    EXPECT_NE(kept.find("first hm"), std::string::npos) << name;
    EXPECT_NE(kept.find("second hm"), std::string::npos) << name;
    const std::string plain = make_renderer(name, nullptr)->render_text(messages, {});
    EXPECT_EQ(plain.find("first hm"), std::string::npos) << name;
    EXPECT_EQ(make_renderer(name, nullptr, {.preserve_thinking_between_tool_calls = true})
                  ->render_text(messages, {}),
              plain);
  }
}

TEST(RendererFlags, BetweenToolCallsKeepsOnlyAfterTheLastUserOfAToolCycle) {
  Message call = calling("", "{}");
  call.reasoning = "rc";
  const std::vector<Message> messages = {
      user("a"), assistant("A", "old"), user("b"), assistant("B", "rb"), call, tool("1")};
  const auto between =
      make_renderer("kimi-k2-thinking", nullptr, {.preserve_thinking_between_tool_calls = true});
  const std::string text = between->render_text(messages, {});
  EXPECT_EQ(text.find("old"), std::string::npos);
  EXPECT_NE(text.find("<think>rb</think>"), std::string::npos);
  EXPECT_NE(text.find("<think>rc</think>"), std::string::npos);
  const auto deepseek =
      make_renderer("deepseek-v3.1", nullptr, {.preserve_thinking_between_tool_calls = true});
  EXPECT_NE(deepseek->render_text(messages, {}).find("<think>rb</think>B"), std::string::npos);
  EXPECT_EQ(deepseek->render_text(messages, {}).find("old"), std::string::npos);
  // Without thinking there is nothing to add.
  EXPECT_EQ(
      make_renderer("qwen3", nullptr, {.preserve_all_thinking = true})
          ->render_text({user("a"), assistant("A"), user("b")}, {}),
      make_renderer("qwen3", nullptr)->render_text({user("a"), assistant("A"), user("b")}, {}));
}

ParsedResponse parsed(const char* family, std::string_view text,
                      const RenderOptions& options = {}) {
  return make_renderer(family, &kTokenizer)->parse_response(ids_of(text), options);
}

TEST(RendererParse, QwenStatuses) {
  const ParsedResponse all = parsed(
      "qwen3",
      "<think>\nhm\n</think>\n\nsay\n<tool_call>\n{\"name\": \"calc\", \"arguments\": {\"a\":1}}\n"
      "</tool_call>\n<tool_call>\n{bad\n</tool_call>\n<tool_call>{\"arguments\": {}}</tool_call>"
      "<tool_call>[1]</tool_call><tool_call>{\"name\": \"x\"<|im_end|>rest");
  EXPECT_TRUE(all.closed);
  EXPECT_EQ(all.reasoning, "hm");
  EXPECT_EQ(all.content, "say");
  ASSERT_EQ(all.tool_calls.size(), 5u);
  EXPECT_EQ(all.tool_calls[0].status, ToolCallStatus::ok);
  EXPECT_EQ(all.tool_calls[0].call.arguments, "{\"a\":1}");
  EXPECT_EQ(all.tool_calls[1].status, ToolCallStatus::invalid_json);
  EXPECT_EQ(all.tool_calls[2].status, ToolCallStatus::missing_name);
  EXPECT_EQ(all.tool_calls[3].status, ToolCallStatus::malformed);
  EXPECT_EQ(all.tool_calls[4].status, ToolCallStatus::unclosed_block);
  EXPECT_EQ(all.tool_calls[4].raw, "<tool_call>{\"name\": \"x\"");
}

TEST(RendererParse, TokenSpansHoldTheBlock) {
  const std::vector<int32_t> ids = ids_of("the x\n<tool_call>\n{}\n</tool_call> tail<|im_end|>");
  const ParsedResponse response = make_renderer("qwen3", &kTokenizer)->parse_response(ids, {});
  ASSERT_EQ(response.tool_calls.size(), 1u);
  const ParsedToolCall& call = response.tool_calls[0];
  const std::span<const int32_t> all(ids);
  EXPECT_EQ(kTokenizer.decode(all.subspan(call.first_token, call.last_token - call.first_token)),
            call.raw);
  EXPECT_EQ(response.content, "the x\n tail");
}

TEST(RendererParse, ThinkingThatNeverEnds) {
  const ParsedResponse qwen = parsed("qwen3", "<think>\nand on");
  EXPECT_FALSE(qwen.closed);
  EXPECT_EQ(qwen.reasoning, "and on");
  EXPECT_EQ(qwen.content, "");
  EXPECT_EQ(parsed("qwen3.5", "and on").reasoning, "and on");
  RenderOptions off;
  off.enable_thinking = false;
  EXPECT_EQ(parsed("qwen3.5", "an answer", off).content, "an answer");
  EXPECT_EQ(parsed("deepseek-v3.1", "hm</think>A").reasoning, "hm");
  EXPECT_EQ(parsed("qwen3", "").content, "");
}

TEST(RendererParse, OtherFamilies) {
  const ParsedResponse glm = parsed(
      "glm4.6",
      "\n<think>r</think>\nok\n<tool_call>calc\n<arg_key>n</arg_key>\n<arg_value>3</arg_value>\n"
      "<arg_key>s</arg_key>\n<arg_value>4</arg_value>\n</tool_call>\n<tool_call>calc\n<arg_key>n"
      "</tool_call><|observation|>",
      {.tools_json = kTools});
  ASSERT_EQ(glm.tool_calls.size(), 2u);
  EXPECT_EQ(glm.tool_calls[0].call.arguments, R"({"n": 3, "s": "4"})");
  EXPECT_EQ(glm.tool_calls[1].status, ToolCallStatus::malformed);
  EXPECT_TRUE(glm.closed);

  const ParsedResponse llama =
      parsed("llama3", R"({"name": "calc", "parameters": {"n": 1}}<|eot_id|>)");
  ASSERT_EQ(llama.tool_calls.size(), 1u);
  EXPECT_EQ(llama.tool_calls[0].call.name, "calc");
  EXPECT_EQ(llama.content, "");
  EXPECT_EQ(parsed("llama3", R"({"name": "Bob", "age": 3}<|eot_id|>)").tool_calls.size(), 0u);
  const ParsedResponse cut = parsed("llama3", R"({"name": "calc", "par)");
  ASSERT_EQ(cut.tool_calls.size(), 1u);
  EXPECT_EQ(cut.tool_calls[0].status, ToolCallStatus::unclosed_block);

  const ParsedResponse kimi = parsed(
      "kimi-k2-thinking",
      "<think></think>x<|tool_calls_section_begin|><|tool_call_begin|>functions.calc:4"
      "<|tool_call_argument_begin|>{\"n\": 1}<|tool_call_end|><|tool_call_begin|>functions.:0"
      "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|><|im_end|>");
  ASSERT_EQ(kimi.tool_calls.size(), 2u);
  EXPECT_EQ(kimi.tool_calls[0].call.name, "calc");
  EXPECT_EQ(kimi.tool_calls[0].call.id, "functions.calc:4");
  EXPECT_EQ(kimi.tool_calls[1].status, ToolCallStatus::missing_name);
  EXPECT_EQ(kimi.content, "x");

  const ParsedResponse xml =
      parsed("qwen3.5",
             "r\n</think>\n\n<tool_call>\n<function=calc>\n<parameter=b>\nTrue\n</parameter>\n"
             "</function>\n</tool_call>\n<tool_call>\nnothing\n</tool_call><|im_end|>");
  ASSERT_EQ(xml.tool_calls.size(), 2u);
  EXPECT_EQ(xml.tool_calls[0].call.arguments, R"({"b": true})");
  EXPECT_EQ(xml.tool_calls[1].status, ToolCallStatus::malformed);
}

// Words with line breaks in them, tags that are spelled out, and multi-byte characters.
std::string random_words(Rng& rng) {
  static const std::vector<std::string> kWords = {
      "the", "a\nb", "x", "\n\n",       " ",        "<think>",     "7",           "\"q\"",
      "\\",  "{",    "}", "<|im_end|>", "\xc3\xa9", "<tool_call>", "</tool_call>"};
  std::string text = "w";
  for (uint64_t n = rng.below(6); n > 0; --n) text += kWords[rng.below(kWords.size())];
  return text + ".";
}

Message random_turn(Rng& rng, const std::string& family, bool always_thinks) {
  Message message = assistant(random_words(rng));
  if (thinks(family) && (always_thinks || rng.below(2))) message.reasoning = random_words(rng);
  const uint64_t calls = has_tools(family) ? rng.below(calls_alone(family) ? 2 : 3) : 0;
  for (uint64_t k = 0; k < calls; ++k) {
    JsonValue arguments{.kind = JsonValue::Kind::object};
    if (rng.below(2)) arguments.set("s", JsonValue::of_string(random_words(rng)));
    if (rng.below(2)) arguments.set("n", {.kind = JsonValue::Kind::number, .text = "12"});
    if (rng.below(2)) arguments.set("b", {.kind = JsonValue::Kind::boolean, .truth = true});
    if (rng.below(2)) arguments.set("o", {.kind = JsonValue::Kind::object});
    message.tool_calls.push_back(
        {has_ids(family) ? "functions.calc:" + std::to_string(k) : "", "calc", to_json(arguments)});
  }
  if (calls > 0 && (calls_alone(family) || rng.below(2))) message.content.clear();
  return message;
}

class RendererProperty : public testing::TestWithParam<std::string> {
 protected:
  std::unique_ptr<Renderer> make() const {
    return make_renderer(GetParam(), &kTokenizer, {.preserve_all_thinking = thinks(GetParam())});
  }
  RenderOptions options() const {
    return {.tools_json = has_tools(GetParam()) ? kTools : "", .enable_thinking = true};
  }
  std::vector<int32_t> completion_of(const Rendered& rendered, int message) const {
    std::vector<int32_t> ids;
    for (size_t i = 0; i < rendered.ids.size(); ++i) {
      if (rendered.sampled[i] && rendered.message_index[i] == message) {
        ids.push_back(rendered.ids[i]);
      }
    }
    return ids;
  }
};

TEST_P(RendererProperty, ParsingARenderingGivesTheMessageBack) {
  const auto renderer = make();
  Rng rng(7);
  for (int round = 0; round < 400; ++round) {
    const Message turn = random_turn(rng, GetParam(), false);
    const Rendered rendered = renderer->render({user(random_words(rng)), turn}, options());
    ASSERT_EQ(kTokenizer.decode(rendered.ids), rendered.text);
    const ParsedResponse response = renderer->parse_response(completion_of(rendered, 1), options());
    SCOPED_TRACE(rendered.text);
    ASSERT_EQ(response.content, turn.content);
    ASSERT_EQ(response.reasoning, turn.reasoning);
    ASSERT_EQ(response.closed, !has_no_close(GetParam()));
    ASSERT_EQ(response.tool_calls.size(), turn.tool_calls.size());
    for (size_t k = 0; k < turn.tool_calls.size(); ++k) {
      ASSERT_EQ(response.tool_calls[k].status, ToolCallStatus::ok);
      ASSERT_EQ(response.tool_calls[k].call.name, turn.tool_calls[k].name);
      ASSERT_EQ(response.tool_calls[k].call.id, turn.tool_calls[k].id);
      ASSERT_EQ(response.tool_calls[k].call.arguments, turn.tool_calls[k].arguments);
    }
  }
}

// If all thinking is kept, the bridge and a full render give the same tokens.
TEST_P(RendererProperty, TheBridgeIsTheRenderThatKeepsItsPrefix) {
  const auto renderer = make();
  Rng rng(11);
  for (int round = 0; round < 300; ++round) {
    RenderOptions ask = options();
    ask.add_generation_prompt = true;
    const std::vector<Message> before = {user(random_words(rng))};
    const Message turn = random_turn(rng, GetParam(), true);
    std::vector<Message> next;
    for (size_t k = 0; k < turn.tool_calls.size(); ++k) next.push_back(tool(random_words(rng)));
    if (next.empty() || rng.below(2)) next.push_back(user(random_words(rng)));

    std::vector<Message> all = before;
    all.push_back(turn);
    all.insert(all.end(), next.begin(), next.end());
    const Rendered full = renderer->render(all, ask);
    const std::vector<int32_t> prompt = renderer->render(before, ask).ids;
    const std::vector<int32_t> completion = completion_of(full, 1);
    const auto bridged = renderer->bridge_to_next_turn(prompt, completion, next, options());
    SCOPED_TRACE(full.text);
    ASSERT_TRUE(bridged);
    ASSERT_EQ(bridged->text, full.text);
    ASSERT_EQ(bridged->ids, full.ids);
    ASSERT_EQ(bridged->sampled, full.sampled);

    // A truncated completion: the bridge either declines or leaves everything before unchanged.
    const auto cut = std::span(completion).first(rng.below(completion.size()));
    const auto closed = renderer->bridge_to_next_turn(prompt, cut, next, options());
    if (!closed) continue;
    std::vector<int32_t> prefix = prompt;
    prefix.insert(prefix.end(), cut.begin(), cut.end());
    ASSERT_GT(closed->ids.size(), prefix.size());
    ASSERT_TRUE(std::equal(prefix.begin(), prefix.end(), closed->ids.begin()));
    ASSERT_EQ(std::count(closed->sampled.begin(), closed->sampled.end(), 1),
              static_cast<std::ptrdiff_t>(cut.size()));
    ASSERT_EQ(closed->text, kTokenizer.decode(closed->ids));
  }
}

INSTANTIATE_TEST_SUITE_P(Families, RendererProperty, testing::ValuesIn(renderer_names()),
                         [](const auto& tested) {
                           std::string name = tested.param;
                           for (char& c : name) c = std::isalnum(c) ? c : '_';
                           return name;
                         });

TEST(RendererBridge, DeclinesWhatItCannotProve) {
  const auto qwen = make_renderer("qwen3", &kTokenizer);
  const std::vector<int32_t> prompt =
      ids_of("<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n");
  const auto bridge = [&](std::string_view completion, const std::vector<Message>& next) {
    return qwen->bridge_to_next_turn(prompt, ids_of(completion), next, {}).has_value();
  };
  EXPECT_TRUE(bridge("A<|im_end|>", {user("p")}));
  EXPECT_TRUE(bridge("A", {user("p")}));  // truncated: closed with <|im_end|>
  EXPECT_FALSE(bridge("A<|im_end|>", {}));
  EXPECT_FALSE(bridge("A<|im_end|>", {assistant("B")}));
  EXPECT_FALSE(bridge("A<|im_end|>", {user("p"), assistant("B"), user("r")}));
  EXPECT_FALSE(bridge("<think>\nhm", {user("p")}));
  EXPECT_FALSE(bridge("<tool_call>\n{", {tool("1")}));
  EXPECT_FALSE(bridge("A<|im_end|>\nB", {user("p")}));
  EXPECT_FALSE(bridge("\xc3", {user("p")}));  // half a character
  // GLM's stop token says who speaks next.
  const auto glm = make_renderer("glm4.6", &kTokenizer);
  const auto glm_bridge = [&](std::string_view completion, const Message& next) {
    return glm->bridge_to_next_turn({}, ids_of(completion), {next}, {}).has_value();
  };
  EXPECT_TRUE(glm_bridge("\nA<|user|>", user("p")));
  EXPECT_FALSE(glm_bridge("\nA<|observation|>", user("p")));
  EXPECT_TRUE(glm_bridge("\nA<|observation|>", tool("1")));
  EXPECT_FALSE(glm_bridge("\nA<|endoftext|>", user("p")));
  EXPECT_TRUE(glm_bridge("\nA", user("p")));
  // Templates that refuse or move system messages.
  const Message system{.role = Role::system, .content = "s"};
  for (const char* name : {"qwen3.5", "deepseek-v3.1"}) {
    const auto renderer = make_renderer(name, &kTokenizer);
    EXPECT_FALSE(renderer->bridge_to_next_turn({}, {}, {system}, {})) << name;
  }
}

}  // namespace
}  // namespace leeway
