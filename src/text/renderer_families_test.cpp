// What is peculiar to single families: masks, parsing and bridging of gpt-oss, refusals, ids.
#include <gtest/gtest.h>

#include "leeway/error.h"
#include "text/renderer.h"
#include "text/renderers/json_value.h"
#include "text/renderers/toy_tokenizer.h"

namespace leeway {
namespace {

const ToyTokenizer kTokenizer;
constexpr const char* kTools =
    R"([{"type": "function", "function": {"name": "calc", "description": "Computes."}}])";

Message user(std::string text) { return {.role = Role::user, .content = std::move(text)}; }
Message tool(std::string text) { return {.role = Role::tool, .content = std::move(text)}; }
Message assistant(std::string text, std::optional<std::string> reasoning = {}) {
  return {.role = Role::assistant, .content = std::move(text), .reasoning = std::move(reasoning)};
}
Message calling(std::string id, std::optional<std::string> reasoning = {}) {
  Message message = assistant("", std::move(reasoning));
  message.tool_calls.push_back({std::move(id), "calc", "{\"n\": 1}"});
  return message;
}

std::vector<int32_t> ids_of(std::string_view text) {
  return kTokenizer.encode(text, SpecialTokens::recognise);
}
std::string sampled(const char* family, const std::vector<Message>& messages,
                    const RenderOptions& options = {}) {
  const Rendered rendered = make_renderer(family, &kTokenizer)->render(messages, options);
  std::vector<int32_t> ids;
  for (size_t i = 0; i < rendered.ids.size(); ++i) {
    if (rendered.sampled[i]) ids.push_back(rendered.ids[i]);
  }
  return kTokenizer.decode(ids);
}
ParsedResponse parsed(const char* family, std::string_view text) {
  return make_renderer(family, &kTokenizer)->parse_response(ids_of(text), {});
}
// The error of rendering, or "" if there is none.
std::string refusal(const char* family, const std::vector<Message>& messages,
                    const RenderOptions& options = {}) {
  try {
    make_renderer(family, nullptr)->render_text(messages, options);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}
bool says(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(GptOss, TheMaskHoldsAllMessagesOfATurnButTheFirstHeader) {
  EXPECT_EQ(sampled("gpt-oss", {user("q"), assistant("A", "hm")}),
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>A"
            "<|return|>");
  // In the history, <|end|> stands where the model wrote <|return|>.
  EXPECT_EQ(sampled("gpt-oss", {user("q"), assistant("A", "hm"), user("p")}),
            "<|channel|>final<|message|>A");
  EXPECT_EQ(sampled("gpt-oss", {user("q"), calling("", "hm"), tool("1")}),
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant to=functions.calc"
            "<|channel|>commentary json<|message|>{\"n\": 1}<|call|>");
}

TEST(GptOss, ReadsWhatTheModelWritesNotOnlyWhatTheTemplateWrites) {
  // Models name the recipient after the channel, and mark the content type by a token.
  const ParsedResponse call = parsed(
      "gpt-oss",
      "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>I "
      "look.<|end|><|start|>assistant<|channel|>commentary to=functions.calc <|constrain|>json"
      "<|message|>{\"n\": 1}<|call|>");
  EXPECT_TRUE(call.closed);
  EXPECT_EQ(call.reasoning, "hm");
  EXPECT_EQ(call.content, "I look.");
  ASSERT_EQ(call.tool_calls.size(), 1u);
  EXPECT_EQ(call.tool_calls[0].status, ToolCallStatus::ok);
  EXPECT_EQ(call.tool_calls[0].call.name, "calc");
  EXPECT_EQ(call.tool_calls[0].call.arguments, "{\"n\": 1}");

  const ParsedResponse bad =
      parsed("gpt-oss", " to=functions.calc<|channel|>commentary json<|message|>{n<|call|>");
  ASSERT_EQ(bad.tool_calls.size(), 1u);
  EXPECT_EQ(bad.tool_calls[0].status, ToolCallStatus::invalid_json);
  const ParsedResponse cut =
      parsed("gpt-oss", " to=functions.calc<|channel|>commentary json<|message|>{\"n\"");
  ASSERT_EQ(cut.tool_calls.size(), 1u);
  EXPECT_EQ(cut.tool_calls[0].status, ToolCallStatus::unclosed_block);
  EXPECT_FALSE(cut.closed);
  EXPECT_EQ(parsed("gpt-oss", "<|channel|>analysis<|message|>and on").reasoning, "and on");
  EXPECT_EQ(parsed("gpt-oss", "no channel<|return|>").content, "no channel");
  EXPECT_EQ(parsed("gpt-oss", "<|channel|>fin").content, "");
}

TEST(GptOss, TheBridgeFollowsACallAndACutOffAnswer) {
  const auto renderer = make_renderer("gpt-oss", &kTokenizer);
  const std::vector<int32_t> prompt = ids_of("<|start|>user<|message|>q<|end|><|start|>assistant");
  const auto bridge = [&](std::string_view completion, const Message& next) -> std::string {
    const auto bridged = renderer->bridge_to_next_turn(prompt, ids_of(completion), {next}, {});
    return bridged ? bridged->text.substr(kTokenizer.decode(prompt).size()) : "";
  };
  const std::string call = " to=functions.calc<|channel|>commentary json<|message|>{}<|call|>";
  EXPECT_EQ(bridge(call, tool("1")),
            call +
                "<|start|>functions.calc to=assistant<|channel|>commentary<|message|>\"1\"<|end|>"
                "<|start|>assistant");
  const std::string cut = "<|channel|>final<|message|>The answ";
  EXPECT_EQ(bridge(cut, user("p")),
            cut + "<|end|><|start|>user<|message|>p<|end|><|start|>assistant");
  // <|return|> is in no conversation that goes on, and thinking cannot be closed.
  EXPECT_EQ(bridge("<|channel|>final<|message|>A<|return|>", user("p")), "");
  EXPECT_EQ(bridge("<|channel|>analysis<|message|>hm", user("p")), "");
  EXPECT_EQ(bridge("<|channel|>commentary<|message|>hm", user("p")), "");
  EXPECT_EQ(bridge("<|channel|>fin", user("p")), "");
  EXPECT_EQ(bridge("", user("p")), "");
  EXPECT_EQ(bridge(call, Message{.role = Role::system, .content = "s"}), "");
}

TEST(GptOss, RefusesWhatTheTemplateWouldDrop) {
  Message twice = calling("");
  twice.tool_calls.push_back(twice.tool_calls.front());
  EXPECT_TRUE(says(refusal("gpt-oss", {user("q"), twice}), "messages[1]: the template writes one"));
  EXPECT_TRUE(says(refusal("gpt-oss", {user("q"), {.role = Role::system, .content = "s"}}),
                   "messages[1]: the template drops"));
  EXPECT_TRUE(says(refusal("gpt-oss", {user("q"), assistant("a<|channel|>final<|message|>b")}),
                   "channels"));
  const auto with = [](const char* extra) { return RenderOptions{.extra_json = extra}; };
  EXPECT_TRUE(says(refusal("gpt-oss", {user("q")}, with(R"({"builtin_tools": ["python"]})")),
                   "builtin_tools is not supported"));
  EXPECT_TRUE(says(refusal("gpt-oss", {user("q")}, with(R"({"current_date": "today"})")),
                   "current_date must be a day such as 2025-08-05, not \"today\""));
  EXPECT_TRUE(says(refusal("gpt-oss", {user("q")}, with(R"({"reasoning_effort": 3})")),
                   "reasoning_effort must be a string, not a number"));
}

TEST(GptOss, SaysWhichToolTheTemplateCannotWrite) {
  const auto tools = [](const std::string& json) {
    return refusal("gpt-oss", {user("q")}, {.tools_json = json});
  };
  EXPECT_TRUE(says(tools(R"([{"function": {"name": "f"}}])"),
                   "tools[0].function: the template needs a description"));
  const std::string head = R"([{"function": {"name": "f", "description": "d", "parameters": )";
  EXPECT_TRUE(says(tools(head + R"({"properties": [1]}}}])"), "must be an object, not a list"));
  EXPECT_TRUE(says(tools(head + R"({"properties": {"a": {"type": "string", "enum": "x"}}}}}])"),
                   "tools[0].function.parameters.a.enum: must be a list, not a string"));
  EXPECT_TRUE(says(tools(head + R"({"properties": {"a": {"oneOf": 3}}}}}])"), "oneOf: must be"));
  EXPECT_EQ(tools(head + R"({"properties": {"a": true, "b": {"type": []}}}}}])"), "");
}

TEST(ChatMl, RefusesToolsInsteadOfDroppingThem) {
  for (const char* name : {"chatml", "smollm2"}) {
    EXPECT_TRUE(says(refusal(name, {user("q")}, {.tools_json = kTools}), "no place for tools"));
    EXPECT_TRUE(says(refusal(name, {user("q"), calling("")}), "no place for tool calls")) << name;
    EXPECT_EQ(sampled(name, {user("q"), assistant("A"), user("p")}), "A<|im_end|>");
    EXPECT_EQ(parsed(name, "A<|im_end|>").content, "A");
  }
}

TEST(Qwen3Coder, TheMaskAndTheCalls) {
  EXPECT_EQ(sampled("qwen3-coder", {user("q"), calling(""), tool("1"), assistant("A")}),
            "<tool_call>\n<function=calc>\n<parameter=n>\n1\n</parameter>\n</function>\n"
            "</tool_call><|im_end|>A<|im_end|>");
  const ParsedResponse response =
      parsed("qwen3-coder",
             "Let me see.\n\n<tool_call>\n<function=calc>\n</function>\n</tool_call>\n<tool_call>\n"
             "<function=calc>\n<parameter=n>\n1\n</tool_call><|im_end|>");
  EXPECT_EQ(response.content, "Let me see.");
  ASSERT_EQ(response.tool_calls.size(), 2u);
  EXPECT_EQ(response.tool_calls[0].call.arguments, "{}");
  EXPECT_EQ(response.tool_calls[1].status, ToolCallStatus::malformed);
}

// The published template would write an empty id, from which no model learns anything.
TEST(KimiK2, CallsAndResultsWithoutIdsGetThem) {
  const auto renderer = make_renderer("kimi-k2", nullptr);
  const std::string text = renderer->render_text(
      {user("q"), calling(""), tool("1"), calling("mine"), tool("2"), calling(""), tool("3")}, {});
  EXPECT_TRUE(says(text, "<|tool_call_begin|>functions.calc:0<|tool_call_argument_begin|>"));
  EXPECT_TRUE(says(text, "## Return of functions.calc:0\n1"));
  EXPECT_TRUE(says(text, "## Return of mine\n2"));
  EXPECT_TRUE(says(text, "## Return of functions.calc:1\n3"));
  // Results that name their calls may come in any order.
  Message both = calling("a");
  both.tool_calls.push_back({"b", "calc", "{}"});
  Message second = tool("second");
  second.tool_call_id = "b";
  const std::string swapped = renderer->render_text({user("q"), both, second, tool("first")}, {});
  EXPECT_TRUE(says(swapped, "## Return of b\nsecond"));
  EXPECT_TRUE(says(swapped, "## Return of a\nfirst"));
}

TEST(JsonValue, PythonReprOfListsAndObjects) {
  const auto repr = [](const char* json) { return to_python_repr(read_json("json", json)); };
  EXPECT_EQ(repr(R"(["string", "null"])"), "['string', 'null']");
  EXPECT_EQ(repr(R"({"a": [1, 2.0, true, null], "it's": "x\n\"\\"})"),
            "{'a': [1, 2.0, True, None], \"it's\": 'x\\n\"\\\\'}");
  EXPECT_EQ(repr(R"(["it's \"both\"", "\u0001", "\u00e9"])"),
            "['it\\'s \"both\"', '\\x01', '\xc3\xa9']");
  EXPECT_EQ(repr(R"("plain")"), "plain");
  EXPECT_EQ(repr("[]"), "[]");
}

}  // namespace
}  // namespace leeway
