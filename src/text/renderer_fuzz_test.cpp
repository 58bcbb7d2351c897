// For any sampled ids and any JSON input, the result is either valid or an Error that says where
// the problem is.
#include <gtest/gtest.h>

#include <algorithm>

#include "base/rng.h"
#include "leeway/error.h"
#include "text/messages_json.h"
#include "text/renderers/toy_tokenizer.h"

namespace leeway {
namespace {

TEST(RendererFuzz, ParseAndBridgeTakeAnyIds) {
  const ToyTokenizer tokenizer;
  std::vector<std::unique_ptr<Renderer>> renderers;
  for (const std::string& name : renderer_names()) {
    renderers.push_back(make_renderer(name, &tokenizer));
  }
  const std::vector<std::string> pieces = {"{\"name\": \"f\", \"arguments\": {",
                                           "}",
                                           "<function=f>",
                                           "<parameter=a>",
                                           "</parameter>",
                                           "</function>",
                                           "functions.f:0",
                                           " to=functions.f",
                                           "analysis",
                                           "final",
                                           "assistant",
                                           "\n",
                                           "\xe2\x96",
                                           "\""};
  Rng rng(3);
  for (int round = 0; round < 20000; ++round) {
    std::vector<int32_t> ids;
    for (uint64_t n = rng.below(40); n > 0; --n) {
      const uint64_t choice = rng.below(4);
      if (choice == 0) {
        const auto piece =
            tokenizer.encode(pieces[rng.below(pieces.size())], SpecialTokens::as_text);
        ids.insert(ids.end(), piece.begin(), piece.end());
      } else if (choice == 1) {
        ids.push_back(static_cast<int32_t>(rng.below(400)) - 20);
      } else {
        ids.push_back(260 + static_cast<int32_t>(rng.below(60)));
      }
    }
    RenderOptions options;
    if (rng.below(2)) options.enable_thinking = rng.below(2) == 0;
    const Renderer& renderer = *renderers[rng.below(renderers.size())];
    ASSERT_NO_THROW({
      const ParsedResponse response = renderer.parse_response(ids, options);
      for (const ParsedToolCall& call : response.tool_calls) {
        ASSERT_LE(call.first_token, call.last_token);
        ASSERT_LE(call.last_token, ids.size());
      }
      const std::vector<int32_t> prompt = {65};
      const auto bridged = renderer.bridge_to_next_turn(
          prompt, ids, {{.role = rng.below(2) ? Role::user : Role::tool, .content = "x"}}, options);
      if (bridged) {
        ASSERT_TRUE(std::equal(ids.begin(), ids.end(), bridged->ids.begin() + 1));
      }
    }) << renderer.name();
  }
}

TEST(RendererFuzz, MutatedJsonIsReadOrRefused) {
  const std::string seed =
      R"({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"},)"
      R"( {"role": "assistant", "content": null, "reasoning_content": "r", "tool_calls":)"
      R"( [{"id": "1", "function": {"name": "f", "arguments": {"a": [1, 2.5e3, true]}}}]},)"
      R"( {"role": "tool", "content": "1", "tool_call_id": "1"}], "tools": [{"type": "function"}],)"
      R"( "add_generation_prompt": true, "options": {"enable_thinking": false, "thinking": 1}})";
  const std::string letters = "{}[]\",:0123456789.eE+-\\untrfalsI \xff\x00";
  const std::vector<std::string> names = renderer_names();
  Rng rng(5);
  size_t read = 0, refused = 0;
  for (int round = 0; round < 20000; ++round) {
    std::string json = seed;
    for (uint64_t n = 1 + rng.below(4); n > 0; --n) {
      const size_t at = rng.below(json.size());
      switch (rng.below(3)) {
        case 0: json[at] = letters[rng.below(letters.size())]; break;
        case 1: json.erase(at, 1 + rng.below(12)); break;
        default: json.insert(at, json.substr(rng.below(json.size()), rng.below(30)));
      }
      if (json.empty()) json.push_back('x');
    }
    try {
      const RenderRequest request = read_render_request("fuzz", json);
      ++read;
      make_renderer(names[rng.below(names.size())], nullptr)
          ->render_text(request.messages, request.options);
    } catch (const Error&) {
      ++refused;
    }
  }
  EXPECT_GT(read, 10u);
  EXPECT_GT(refused, 10u);
}

TEST(MessagesJson, SaysWhatIsWrongAndWhere) {
  const auto message_of = [](const std::string& json) -> std::string {
    try {
      read_render_request("in.json", json);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  const auto expect = [&](const std::string& messages, const std::string& part) {
    const std::string text = message_of("{\"messages\": [" + messages + "]}");
    EXPECT_NE(text.find(part), std::string::npos) << messages << " said: " << text;
  };
  const std::string ok = R"({"role": "user", "content": "x"}, )";
  expect(ok + R"({"role": "robot", "content": ""})", "messages[1]: unknown role \"robot\"");
  expect(ok + R"({"content": ""})", "messages[1]: role is missing");
  expect(ok + R"({"role": "user"})", "messages[1]: content is missing");
  expect(ok + R"({"role": "user", "content": 3})", "messages[1]: content must be a string");
  expect("7", "messages[0]: must be an object");
  expect(R"({"role": "assistant", "content": "", "tool_calls": [{"function": {}}]})",
         "messages[0].tool_calls[0]: the call has no name");
  expect(R"({"role": "assistant", "content": "", "tool_calls": {}})", "tool_calls must be a list");
  expect(R"({"role": "assistant", "content": "", "reasoning_content": 1})", "must be a string");
  EXPECT_NE(message_of("{\"messages\":\n [}").find("in.json line 2"), std::string::npos);
  EXPECT_NE(message_of("{}").find("messages are missing"), std::string::npos);
  EXPECT_NE(message_of("[]").find("must be an object"), std::string::npos);
  EXPECT_NE(message_of(std::string(100000, '[')).find("nested deeper"), std::string::npos);
  EXPECT_EQ(message_of("{\"messages\": [{\"role\": \"user\", \"content\": \"\xff\xfe\"}]}"), "");
}

TEST(MessagesJson, WritesWhatItReads) {
  const std::string json =
      R"([{"role": "user", "content": "x\n", "name": "bob"}, {"role": "assistant", "content": null,)"
      R"( "reasoning_content": "", "tool_calls": [{"type": "function", "id": "i", "function":)"
      R"( {"name": "f", "arguments": {"big": 123456789012345678901234567890, "x": 1.0}}}]},)"
      R"( {"role": "tool", "content": "1", "tool_call_id": "i"}])";
  EXPECT_EQ(write_messages(read_messages("in", json)), json);
}

}  // namespace
}  // namespace leeway
