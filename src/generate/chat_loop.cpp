#include "generate/chat_loop.h"

#include <fmt/format.h>

#include <chrono>
#include <functional>
#include <vector>

#include "leeway/error.h"
#include "leeway/presets.h"

namespace leeway {

namespace {

constexpr const char* kChatHelp =
    "/system TEXT  a new conversation with this system message; without TEXT: without one\n"
    "/reset        a new conversation with the same system message\n"
    "/regenerate   another reply to the last message\n"
    "/help         these lines\n"
    "/exit         leave; Ctrl-D does too\n"
    "Ctrl-C ends a reply. A message that begins with a slash is written with two.";

using MakeReply = std::function<ChatReply(const GenerationEvents&)>;

void show_reply(ChatTerminal& terminal, const MakeReply& make) {
  bool shows = true;  // the terminal takes what it is given
  GenerationEvents events;
  events.on_text = [&](int64_t, const TextPiece& piece) {
    shows = false;
    terminal.show(piece);
    shows = true;
  };
  events.stop = [&] { return terminal.interrupted(); };
  const auto start = std::chrono::steady_clock::now();
  terminal.begin_reply();
  ChatReply reply;
  try {
    reply = make(events);
  } catch (const Error& error) {
    if (!shows) throw;
    terminal.end_reply(nullptr, 0.0);
    terminal.say(error.what());
    return;
  }
  const auto time = std::chrono::steady_clock::now() - start;
  terminal.end_reply(&reply, std::chrono::duration<double>(time).count());
  if (reply.context_full) {
    terminal.say("The context is full: the reply is cut off. /reset begins a new conversation.");
  } else if (reply.generated.sequence.finish == Finish::length) {
    terminal.say("The reply is cut off at its limit, --max-new-tokens.");
  }
}

// False: the user leaves.
bool run_command(ChatSession& session, ChatTerminal& terminal, const std::string& line) {
  static const std::vector<std::string> kCommands = {"/system", "/reset", "/regenerate", "/help",
                                                     "/exit"};
  const size_t end = line.find_first_of(" \t");
  const std::string name = line.substr(0, end);
  const size_t rest = line.find_first_not_of(" \t", end);
  const std::string argument = rest == std::string::npos ? "" : line.substr(rest);
  if (name != "/system" && !argument.empty()) {
    // A path or a sentence is more likely than an argument that no command takes.
    terminal.say(
        fmt::format("{} takes no text; a message that begins with a slash is written with "
                    "two: /{}",
                    name, line));
  } else if (name == "/exit") {
    return false;
  } else if (name == "/help") {
    terminal.say(kChatHelp);
  } else if (name == "/reset") {
    session.reset();
    terminal.say("A new conversation.");
  } else if (name == "/system") {
    session.set_system(argument);
    terminal.say(argument.empty() ? "A new conversation without a system message."
                                  : "A new conversation with this system message.");
  } else if (name == "/regenerate") {
    show_reply(terminal, [&](const auto& events) { return session.regenerate(events); });
  } else {
    const std::string near = nearest_name(name, kCommands);
    terminal.say(
        fmt::format("There is no {}; {}", name,
                    near.empty() ? "/help lists the commands" : "did you mean " + near + "?"));
  }
  return true;
}

}  // namespace

void run_chat(ChatSession& session, ChatTerminal& terminal) {
  while (std::optional<std::string> line = terminal.read_line()) {
    if (line->ends_with('\r')) line->pop_back();
    if (line->find_first_not_of(" \t") == std::string::npos) continue;
    if (line->starts_with('/') && !line->starts_with("//")) {
      if (!run_command(session, terminal, *line)) return;
      continue;
    }
    const std::string message = line->starts_with("//") ? line->substr(1) : *line;
    show_reply(terminal, [&](const auto& events) { return session.send(message, events); });
  }
}

}  // namespace leeway
