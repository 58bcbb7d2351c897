// A chat line by line: what the user types, the session's replies, and the commands between them.
#pragma once

#include <optional>
#include <string>

#include "generate/chat_session.h"

namespace leeway {

// Where the chat takes place. Called by the thread that runs the chat.
class ChatTerminal {
 public:
  virtual ~ChatTerminal() = default;

  // The next line without its end, or nothing when the user is gone.
  virtual std::optional<std::string> read_line() = 0;
  // A reply begins: until end_reply, `interrupted` tells whether the user has asked to end it.
  virtual void begin_reply() = 0;
  virtual bool interrupted() = 0;
  virtual void show(const TextPiece& piece) = 0;
  // `reply` is null if it failed; why is said afterwards.
  virtual void end_reply(const ChatReply* reply, double seconds) = 0;
  // A line that is not part of a reply.
  virtual void say(const std::string& line) = 0;
};

// Until the user leaves. A line that begins with a slash is a command; two slashes begin a message
// with one. What goes wrong with one message is said, and the chat goes on; an Error of the
// terminal, which cannot show a reply or read a line, ends it.
void run_chat(ChatSession& session, ChatTerminal& terminal);

}  // namespace leeway
