#include "generate/chat_session.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "generate/test_support.h"
#include "leeway/error.h"

namespace leeway {
namespace {

class Chat : public ::testing::TestWithParam<const char*> {
 protected:
  explicit Chat(int64_t positions = 512)
      : weights_(testing::byte_weights(4, positions)),
        engine_(weights_, 0, testing::one_thread()),
        text_(testing::byte_text(GetParam())) {
    settings_.max_new_tokens = 30;
    settings_.stop_ids = text_.end_ids;
  }

  ChatSession session() {
    return ChatSession(engine_, text_, most_positions(engine_, weights_.config()), settings_, 10);
  }
  // The reply to these messages without a session.
  Generated reply_to(const std::vector<Message>& messages, uint64_t seed) {
    const auto prompt = text_.renderer->render(messages, {.add_generation_prompt = true}).ids;
    return generate(engine_, *text_.tokenizer, most_positions(engine_, weights_.config()),
                    {.ids = prompt, .seed = seed}, settings_, {})
        .front();
  }

  Parameters weights_;
  Engine engine_;
  ModelText text_;
  GenerationSettings settings_;
};

// The most likely token is always a letter, or the renderer's end token where it would be `end`.
Parameters letters_only(Parameters weights, char end, int32_t end_id) {
  float* rows = weights.find("model.embed_tokens.weight");
  const int64_t size = weights.config().hidden_size;
  for (int64_t id = 0; id < weights.config().vocab_size; ++id) {
    if (id < 'a' || id > 'z') std::fill_n(rows + id * size, size, 0.0f);
  }
  for (int64_t i = 0; i < size; ++i) rows[end_id * size + i] = 1.01f * rows[end * size + i];
  return weights;
}

// Of a template that strips nothing, the bridge writes what rendering writes: the reply to a
// conversation by tokens is the reply to the same messages, closed or cut off.
TEST_P(Chat, IsWhatTheSameMessagesGive) {
  settings_.sampling.temperature = 0.0f;
  int closed = 0, cut = 0;
  for (char end = 'a'; end <= 'z'; ++end) {
    const Parameters weights = letters_only(weights_, end, text_.end_ids.front());
    Engine engine(weights, 0, testing::one_thread());
    ChatSession chat(engine, text_, 512, settings_, 10);
    chat.set_system("Be brief.");
    std::vector<Message> messages = {{.role = Role::system, .content = "Be brief."}};
    for (uint64_t turn = 0; turn < 3; ++turn) {
      const std::string said = "message " + std::to_string(turn);
      messages.push_back({.role = Role::user, .content = said});
      const ChatReply reply = chat.send(said, {});
      const auto prompt = text_.renderer->render(messages, {.add_generation_prompt = true}).ids;
      const Generated expected =
          generate(engine, *text_.tokenizer, 512, {.ids = prompt, .seed = 10 + turn}, settings_, {})
              .front();
      EXPECT_EQ(reply.generated.sequence.ids, expected.sequence.ids) << end << ", turn " << turn;
      EXPECT_EQ(reply.generated.text, expected.text);
      messages.push_back({.role = Role::assistant, .content = reply.generated.text});
      ++(reply.generated.sequence.finish == Finish::stop ? closed : cut);
    }
  }
  EXPECT_GT(closed, 0);
  EXPECT_GT(cut, 0);
}

TEST_P(Chat, RegeneratesWithAnotherSeedInPlaceOfTheReply) {
  ChatSession chat = session();
  EXPECT_THROW(chat.regenerate({}), Error);
  const std::string first = chat.send("Hello", {}).generated.text;
  const std::string second = chat.regenerate({}).generated.text;
  EXPECT_NE(first, second);
  EXPECT_EQ(second, reply_to({{.role = Role::user, .content = "Hello"}}, 11).text);
  EXPECT_EQ(chat.messages().size(), 2u);
  chat.reset();
  EXPECT_TRUE(chat.messages().empty());
  EXPECT_THROW(chat.regenerate({}), Error);
}

TEST_P(Chat, AStoppedReplyStaysAndOneWithoutTokensIsForgotten) {
  ChatSession chat = session();
  int passes = 0;
  GenerationEvents events;
  events.stop = [&] { return ++passes == 4; };
  const ChatReply cut = chat.send("Hello", events);
  EXPECT_EQ(cut.generated.sequence.finish, Finish::cancelled);
  EXPECT_EQ(cut.generated.sequence.ids.size(), 4u);
  EXPECT_EQ(chat.messages().size(), 2u);
  const ChatReply next = chat.send("And?", {});
  EXPECT_FALSE(next.generated.sequence.ids.empty());
  EXPECT_EQ(chat.messages().size(), 4u);
}

TEST_P(Chat, SaysThatTheContextIsFullAndForgetsTheMessage) {
  ChatSession chat(engine_, text_, 300, settings_, 0);
  size_t turns = 0;
  std::string problem;
  while (problem.empty() && turns < 100) {
    const size_t before = chat.messages().size();
    try {
      chat.send("Tell me more.", {});
      ++turns;
    } catch (const Error& error) {
      problem = error.what();
      EXPECT_EQ(chat.messages().size(), before);
    }
  }
  EXPECT_NE(problem.find("context is full"), std::string::npos) << problem;
  EXPECT_NE(problem.find("/reset"), std::string::npos) << problem;
  chat.reset();
  EXPECT_NO_THROW(chat.send("Hi", {}));
}

INSTANTIATE_TEST_SUITE_P(Renderers, Chat, ::testing::Values("qwen2.5", "llama3"),
                         [](const auto& renderer) {
                           std::string name = renderer.param;
                           std::erase(name, '.');
                           return name;
                         });

}  // namespace
}  // namespace leeway
