#include "generate/chat_loop.h"

#include <gtest/gtest.h>

#include <deque>

#include "generate/test_support.h"
#include "leeway/error.h"

namespace leeway {
namespace {

// Types these lines and keeps what is shown.
class FakeTerminal final : public ChatTerminal {
 public:
  explicit FakeTerminal(std::deque<std::string> lines) : lines_(std::move(lines)) {}

  std::optional<std::string> read_line() override {
    if (lines_.empty()) return std::nullopt;
    std::string line = lines_.front();
    lines_.pop_front();
    return line;
  }
  void begin_reply() override { replies.emplace_back(); }
  bool interrupted() override { return stop_replies; }
  void show(const TextPiece& piece) override {
    if (closed) throw Error("nobody reads it");
    replies.back() += piece.text;
  }
  void end_reply(const ChatReply* reply, double) override {
    if (reply == nullptr) replies.back() = "failed";
  }
  void say(const std::string& line) override { said += line + "\n"; }

  size_t left() const { return lines_.size(); }
  bool says(std::string_view part) const { return said.find(part) != std::string::npos; }

  std::vector<std::string> replies;
  std::string said;
  bool stop_replies = false, closed = false;

 private:
  std::deque<std::string> lines_;
};

class ChatLoop : public ::testing::Test {
 protected:
  ChatLoop() : weights_(testing::byte_weights(4)), engine_(weights_, 0, testing::one_thread()) {
    settings_.max_new_tokens = 12;
    settings_.stop_ids = text_.end_ids;
  }

  FakeTerminal run(std::deque<std::string> lines, int64_t positions = 512) {
    ChatSession session(engine_, text_, positions, settings_, 0);
    FakeTerminal terminal(std::move(lines));
    run_chat(session, terminal);
    messages_ = session.messages();
    return terminal;
  }

  Parameters weights_;
  Engine engine_;
  ModelText text_ = testing::byte_text("qwen2.5");
  GenerationSettings settings_;
  std::vector<Message> messages_;
};

TEST_F(ChatLoop, RepliesToLinesAndSkipsEmptyOnes) {
  const FakeTerminal terminal = run({"Hello", "", "  ", "And?\r"});
  EXPECT_EQ(terminal.replies.size(), 2u);
  ASSERT_EQ(messages_.size(), 4u);
  EXPECT_EQ(messages_[2].content, "And?");
}

TEST_F(ChatLoop, CommandsDoWhatHelpSays) {
  FakeTerminal terminal = run({"/help", "/system Be brief.", "Hello", "/regenerate", "/reset"});
  EXPECT_TRUE(terminal.says("/system TEXT") && terminal.says("/exit")) << terminal.said;
  EXPECT_EQ(terminal.replies.size(), 2u);
  EXPECT_NE(terminal.replies[0], terminal.replies[1]);
  ASSERT_EQ(messages_.size(), 1u) << "the system message stays";
  EXPECT_EQ(messages_[0].content, "Be brief.");

  terminal = run({"/system Be brief.", "/system", "Hello", "/exit", "not read"});
  EXPECT_EQ(terminal.left(), 1u);
  ASSERT_EQ(messages_.size(), 2u);
  EXPECT_EQ(messages_[0].role, Role::user);
}

TEST_F(ChatLoop, SaysWhatIsWrongAndGoesOn) {
  FakeTerminal terminal = run({"/regenerate", "/rest", "/xyzzy", "/etc/hosts is a file",
                               "/exit now", "//etc/hosts", "Hello"});
  EXPECT_TRUE(terminal.says("no reply yet")) << terminal.said;
  EXPECT_TRUE(terminal.says("did you mean /reset?")) << terminal.said;
  EXPECT_TRUE(terminal.says("/xyzzy; /help lists")) << terminal.said;
  EXPECT_TRUE(terminal.says("written with two: //etc/hosts is a file")) << terminal.said;
  EXPECT_TRUE(terminal.says("/exit takes no text")) << terminal.said;
  ASSERT_EQ(messages_.size(), 4u);
  EXPECT_EQ(messages_[0].content, "/etc/hosts");
  EXPECT_EQ(terminal.replies.front(), "failed");
}

TEST_F(ChatLoop, EndsWhenTheTerminalCannotShowAReply) {
  ChatSession session(engine_, text_, 512, settings_, 0);
  FakeTerminal terminal({"Hello", "Hello"});
  terminal.closed = true;
  EXPECT_THROW(run_chat(session, terminal), Error);
  EXPECT_EQ(terminal.left(), 1u);
}

TEST_F(ChatLoop, SaysWhenAReplyIsCutOff) {
  settings_.stop_ids.clear();
  EXPECT_TRUE(run({"Hello"}).says("--max-new-tokens"));
  settings_.max_new_tokens = 1024;
  const FakeTerminal full = run({"Hello", "Hello"}, 300);
  EXPECT_TRUE(full.says("The context is full: the reply is cut off. /reset")) << full.said;
  EXPECT_TRUE(full.says("the conversation has")) << full.said;
}

TEST_F(ChatLoop, InterruptedRepliesEndAndTheChatGoesOn) {
  ChatSession session(engine_, text_, 512, settings_, 0);
  FakeTerminal terminal({"Hello", "Again"});
  terminal.stop_replies = true;
  run_chat(session, terminal);
  EXPECT_EQ(terminal.replies.size(), 2u);
  EXPECT_EQ(session.messages().size(), 4u);
}

}  // namespace
}  // namespace leeway
