#include "cli/chat_terminal.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <ctime>

#include "cli/output.h"
#include "leeway/error.h"

namespace leeway {
namespace {

// A signal handler can only access statics. Each Ctrl-C is a byte in the pipe, on which a wait for
// input can wait too.
int wake[2] = {-1, -1};
timespec last_signal;

void on_interrupt(int) {
  constexpr int64_t kSameSignal = 200'000'000;  // nanoseconds
  timespec now = {};
  clock_gettime(CLOCK_MONOTONIC, &now);
  const int64_t since = (now.tv_sec - last_signal.tv_sec) * int64_t{1'000'000'000} + now.tv_nsec -
                        last_signal.tv_nsec;
  if (since < kSameSignal) return;
  last_signal = now;
  const int error = errno;
  (void)!write(wake[1], "c", 1);
  errno = error;
}

// Whether there was a Ctrl-C since the last call.
bool take_interrupts() {
  char bytes[64];
  bool any = false;
  while (read(wake[0], bytes, sizeof bytes) > 0) any = true;
  return any;
}

}  // namespace

TerminalChat::TerminalChat() : interactive_(::isatty(STDIN_FILENO) != 0) {
  if (::pipe2(wake, O_CLOEXEC | O_NONBLOCK) != 0) throw Error("cannot make a pipe for Ctrl-C");
  last_signal = {};
  struct sigaction action = {};
  action.sa_handler = on_interrupt;
  action.sa_flags = SA_RESTART;  // a wait for input sees the pipe
  sigaction(SIGINT, &action, nullptr);
  if (interactive_) say("/help lists the commands, Ctrl-C ends a reply, Ctrl-D leaves");
}

TerminalChat::~TerminalChat() {
  // A Ctrl-C that was pressed once too often must not end a chat that is over as a failure.
  struct sigaction ignore = {};
  ignore.sa_handler = SIG_IGN;
  sigaction(SIGINT, &ignore, nullptr);
  for (int& end : wake) {
    ::close(end);
    end = -1;
  }
}

void TerminalChat::show_prompt() const {
  if (!interactive_) return;
  (void)std::fputs("> ", stderr);
  std::fflush(stderr);
}

std::optional<std::string> TerminalChat::read_line() {
  int interrupts = 0;
  show_prompt();
  while (true) {
    const size_t end = buffer_.find('\n');
    if (end != std::string::npos || (at_end_ && !buffer_.empty())) {
      std::string line = buffer_.substr(0, end);
      buffer_.erase(0, end == std::string::npos ? buffer_.size() : end + 1);
      last_signal = {};  // a Ctrl-C during the next reply is another one, however soon it comes
      return line;
    }
    if (at_end_) {
      if (interactive_) (void)std::fputs("\n", stderr);
      return std::nullopt;
    }
    pollfd waiting[2] = {{STDIN_FILENO, POLLIN, 0}, {wake[0], POLLIN, 0}};
    if (::poll(waiting, 2, -1) < 0) {
      if (errno == EINTR) continue;
      throw Error("cannot wait for input");
    }
    if (take_interrupts()) {
      if (++interrupts == 2) {
        if (interactive_) (void)std::fputs("\n", stderr);
        return std::nullopt;
      }
      if (interactive_) (void)std::fputs("\n", stderr);
      say("Ctrl-C once more leaves");
      show_prompt();
      continue;
    }
    if (waiting[0].revents == 0) continue;
    char bytes[4096];
    const ssize_t got = ::read(STDIN_FILENO, bytes, sizeof bytes);
    if (got < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    // EIO: the terminal has gone.
    if (got < 0 && errno != EIO) {
      throw Error(fmt::format("cannot read standard input: {}", std::strerror(errno)));
    }
    if (got <= 0)
      at_end_ = true;
    else
      buffer_.append(bytes, static_cast<size_t>(got));
  }
}

void TerminalChat::begin_reply() { take_interrupts(); }

bool TerminalChat::interrupted() { return take_interrupts(); }

void TerminalChat::show(const TextPiece& piece) { print_piece(piece.text, piece.thinking); }

void TerminalChat::end_reply(const ChatReply* reply, double seconds) {
  if (reply == nullptr) return;
  print("\n");
  const SampledSequence& sequence = reply->generated.sequence;
  const bool stopped = sequence.finish == Finish::cancelled;
  if (draws()) {
    say(fmt::format("[{} tokens, {:.1f} tokens/s{}]", sequence.ids.size(),
                    static_cast<double>(sequence.ids.size()) / std::max(seconds, 1e-9),
                    stopped ? ", stopped" : ""));
  } else if (stopped) {
    say("The reply is stopped.");
  }
}

void TerminalChat::say(const std::string& line) { leeway::say(line); }

}  // namespace leeway
