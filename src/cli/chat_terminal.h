// The terminal of `leeway generate --chat`, or a pipe in its place.
#pragma once

#include <optional>
#include <string>

#include "generate/chat_loop.h"

namespace leeway {

// Replies go to stdout as they are sampled, everything else to stderr. On a terminal there is a
// prompt, thinking is dim, and a reply ends with its speed. Ctrl-C during a reply ends the reply;
// at the prompt the second one ends the chat, as the end of input does. Two within a fifth of a
// second count as one, since wrappers forward what the terminal sends to all. Handles SIGINT while
// it lives. One at a time.
class TerminalChat final : public ChatTerminal {
 public:
  TerminalChat();
  ~TerminalChat() override;
  TerminalChat(const TerminalChat&) = delete;
  TerminalChat& operator=(const TerminalChat&) = delete;

  std::optional<std::string> read_line() override;
  void begin_reply() override;
  bool interrupted() override;
  void show(const TextPiece& piece) override;
  void end_reply(const ChatReply* reply, double seconds) override;
  void say(const std::string& line) override;

 private:
  void show_prompt() const;

  const bool interactive_;  // stdin is a terminal
  std::string buffer_;      // of stdin, not yet returned
  bool at_end_ = false;
};

}  // namespace leeway
