#include "orchestrator/conversation.h"

#include <gtest/gtest.h>

#include "base/rng.h"
#include "orchestrator/environment_test_support.h"
#include "orchestrator/fake_system.h"

namespace leeway {
namespace {

using namespace leeway::testing;

Example example_of(const std::string& prompt, std::vector<Message> demonstration = {}) {
  Example example;
  example.messages = {{.role = Role::user, .content = prompt}};
  example.demonstration = std::move(demonstration);
  return example;
}

Message assistant(const std::string& content) {
  return {.role = Role::assistant, .content = content};
}

// The text of the tokens with loss, runs of them parted by |.
std::string trained_text(const FakeTalk& talk, const Sample& sample) {
  EXPECT_EQ(sample.ids.size(), sample.loss_mask.size());
  std::string text;
  for (size_t i = 0; i < sample.ids.size(); ++i) {
    if (sample.loss_mask[i] == 0) continue;
    if (!text.empty() && sample.loss_mask[i - 1] == 0) text += "|";
    text += talk.text_of({sample.ids[i]});
  }
  return text;
}

TEST(Conversation, WithoutARendererIsThePromptByteForByte) {
  const FakeTalk talk(false);
  EXPECT_FALSE(talk.conversation.has_renderer());
  Rng rng(3);
  for (int i = 0; i < 200; ++i) {
    std::string prompt = i % 4 == 0 ? "<|im_end|>" : "";  // a user's words are no control tokens
    for (uint64_t n = rng.below(20); n > 0; --n) prompt += static_cast<char>(rng.below(256));
    const std::vector<int32_t> ids = talk.conversation.first_prompt(example_of(prompt));
    EXPECT_EQ(ids.size(), prompt.size());
    EXPECT_EQ(talk.text_of(ids), prompt);
  }
}

TEST(Conversation, WithoutARendererReadsTextAndLeavesOutASpecialStopToken) {
  const auto tokenizer = make_byte_tokenizer({"<end>", "<other>"});
  const Conversation conversation(*tokenizer, nullptr, "\n", std::vector<int32_t>{256});
  const auto read = [&](const std::string& text) {
    return conversation.read(tokenizer->encode(text, SpecialTokens::recognise), false, Example{});
  };
  struct Case {
    std::string text, content;
  };
  for (const Case& c :
       std::vector<Case>{{"abc\n", "abc\n"},   // text that ends a reply is part of it
                         {"abc<end>", "abc"},  // a control token is not
                         {"<end>", ""},
                         {"a<end>b", "a<end>b"},         // not at the end
                         {"abc<end><end>", "abc<end>"},  // one
                         {"abc<other>", "abc<other>"},   // ends nothing
                         {"", ""}}) {
    const Reply reply = read(c.text);
    EXPECT_EQ(reply.text, c.text);
    EXPECT_EQ(reply.response.content, c.content);
    EXPECT_FALSE(reply.response.closed);
  }
  EXPECT_TRUE(conversation.read(std::vector<int32_t>{'a'}, true, Example{}).truncated);
}

TEST(Conversation, WithARendererRoundTrips) {
  const FakeTalk talk(true);
  const std::string prompt = talk.text_of(talk.conversation.first_prompt(example_of("2+2?")));
  EXPECT_EQ(prompt, "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n");
  for (const bool closed : {true, false}) {
    std::vector<int32_t> ids = talk.ids_of("<think>hm</think>\n\nIt is 4.");
    if (closed) ids = talk.ids_of("<think>hm</think>\n\nIt is 4.<|im_end|>");
    const Reply reply = talk.conversation.read(ids, !closed, example_of("2+2?"));
    EXPECT_EQ(reply.response.content, "It is 4.");
    EXPECT_EQ(reply.response.reasoning, "hm");
    EXPECT_EQ(reply.response.closed, closed);
    EXPECT_EQ(reply.truncated, !closed);
    EXPECT_EQ(reply.text, talk.text_of(ids));
    const Message message = message_of(reply);
    EXPECT_EQ(message.role, Role::assistant);
    EXPECT_EQ(message.content, "It is 4.");
    EXPECT_EQ(message.reasoning, "hm");
  }
}

TEST(Conversation, RemembersTheCallsThatCanBeRead) {
  const FakeTalk talk(true);
  Example example = example_of("2+2?");
  example.tools_json = "[{\"type\": \"function\", \"function\": {\"name\": \"add\"}}]";
  const Reply reply = talk.conversation.read(
      talk.reply_of("<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 2}}\n</tool_call>\n"
                    "<tool_call>\n{\"name\": \n</tool_call>"),
      false, example);
  ASSERT_EQ(reply.response.tool_calls.size(), 2u);
  const Message message = message_of(reply);
  ASSERT_EQ(message.tool_calls.size(), 1u);
  EXPECT_EQ(message.tool_calls[0].name, "add");
  EXPECT_NE(talk.text_of(talk.conversation.first_prompt(example)).find("\"add\""),
            std::string::npos);
}

TEST(Conversation, ExtendsWhatWasSampled) {
  const FakeTalk talk(true);
  const Example example = example_of("hello");
  std::vector<Message> history = example.messages;
  const std::vector<Message> next = {{.role = Role::user, .content = "and?"}};
  const std::vector<int32_t> prompt = talk.conversation.first_prompt(example);
  const std::vector<int32_t> completion = talk.reply_of("<think>hm</think>\n\nwell");
  history.push_back(message_of(talk.conversation.read(completion, false, example)));
  history.insert(history.end(), next.begin(), next.end());
  const std::vector<int32_t> ids =
      talk.conversation.next_prompt(prompt, completion, history, next, example);
  EXPECT_EQ(talk.text_of(ids), talk.text_of(prompt) + talk.text_of(completion) +
                                   "\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n");
}

TEST(Conversation, StopsAtTheTokensOfRendererModelAndUser) {
  const auto tokenizer = make_byte_tokenizer(control_tokens_of("qwen3"));
  const auto renderer = make_renderer("qwen3", tokenizer.get());
  const std::vector<int32_t> rendered = renderer->stop_token_ids();
  ASSERT_FALSE(rendered.empty());
  const std::vector<int32_t> eos = {7, rendered.front()};
  const Conversation all(*tokenizer, renderer.get(), "ab", eos);
  std::vector<int32_t> expected = eos;
  expected.insert(expected.end(), rendered.begin() + 1, rendered.end());
  expected.push_back('b');
  EXPECT_EQ(all.stop_ids(), expected) << "each once, the last token of the user's text";
  EXPECT_EQ(Conversation(*tokenizer, nullptr, "\n", {}).stop_ids(), std::vector<int32_t>{'\n'});
  EXPECT_EQ(Conversation(*tokenizer, nullptr, "<|im_end|>", {}).stop_ids(),
            std::vector<int32_t>{*tokenizer->token_id("<|im_end|>")});
  expect_refused([&] { Conversation(*tokenizer, nullptr, "", {}); },
                 {"nothing ends a reply", "rollout.stop", "eos_token_id"});
}

TEST(Conversation, TrainsOnTheAssistantsTokensOfADemonstration) {
  const FakeTalk talk(true);
  const Example one = example_of("2+2?", {assistant("4")});
  const Sample sample = talk.conversation.demonstration(one);
  EXPECT_NE(trained_text(talk, sample).find("4<|im_end|>"), std::string::npos);
  EXPECT_EQ(trained_text(talk, sample).find("2+2"), std::string::npos);

  const Example several = example_of(
      "2+2?", {assistant("four"), {.role = Role::user, .content = "sure?"}, assistant("yes")});
  const std::string trained = trained_text(talk, talk.conversation.demonstration(several));
  EXPECT_NE(trained.find("four<|im_end|>|"), std::string::npos) << trained;
  EXPECT_TRUE(trained.ends_with("yes<|im_end|>")) << trained;
  EXPECT_EQ(trained.find("sure"), std::string::npos) << trained;
}

TEST(Conversation, WithoutARendererEndsADemonstrationWithAStopToken) {
  const FakeTalk talk(false);  // stops at the end of a line
  for (const auto& [answer, trained] : std::vector<std::pair<std::string, std::string>>{
           {"4\n", "4\n"}, {"4", "4\n"}, {"4\n5", "4\n5\n"}, {"", "\n"}}) {
    const Sample sample = talk.conversation.demonstration(example_of("2+2=", {assistant(answer)}));
    EXPECT_EQ(trained_text(talk, sample), trained);
    EXPECT_EQ(talk.text_of(sample.ids), "2+2=" + trained);
  }
  const auto tokenizer = make_byte_tokenizer({"<end>"});
  const Conversation ended(*tokenizer, nullptr, "", std::vector<int32_t>{256});
  EXPECT_EQ(tokenizer->decode(ended.demonstration(example_of("a", {assistant("b")})).ids),
            "ab<end>");
}

TEST(Conversation, WithoutARendererHasOneTurn) {
  const FakeTalk talk(false);
  const Example turns = example_of(
      "2+2?", {assistant("four"), {.role = Role::user, .content = "sure?"}, assistant("yes")});
  expect_refused([&] { talk.conversation.demonstration(turns); },
                 {"4 messages", "orchestrator.renderer.name"});
  Example instructed = example_of("2+2?", {assistant("four")});
  instructed.messages.insert(instructed.messages.begin(),
                             {.role = Role::system, .content = "Be brief."});
  expect_refused([&] { talk.conversation.demonstration(instructed); }, {"3 messages"});
}

}  // namespace
}  // namespace leeway
