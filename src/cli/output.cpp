#include "cli/output.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "base/printable.h"
#include "leeway/error.h"

namespace leeway {

namespace {

void write_result(std::string_view text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0) {
    throw OutputError(fmt::format("cannot write the result to stdout: {}", std::strerror(errno)));
  }
}

}  // namespace

void print(std::string_view text) {
  write_result(::isatty(STDOUT_FILENO) != 0 ? printable(text) : std::string(text));
}

void print_piece(std::string_view text, bool dim) {
  // In one write, so that an interrupted program does not leave the terminal dim.
  const bool styled = dim && ::isatty(STDOUT_FILENO) != 0;
  if (!styled) return print(text);
  write_result("\033[2m" + printable(text) + "\033[0m");
}

void warn(std::string_view text) { say(fmt::format("leeway: warning: {}", text)); }

void say(std::string_view text) {
  // Failing to write to stderr must not change what the program does.
  const std::string line = printable(text) + "\n";
  (void)std::fwrite(line.data(), 1, line.size(), stderr);
}

void redraw(std::string_view text) {
  // What is wider than the terminal would take two lines of it, of which one is replaced. The last
  // column stays free: a character there already moves some terminals to the next line.
  winsize size{};
  const bool known = ::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 1;
  std::string shown = printable(text);
  if (known) shown = fitting(std::move(shown), size.ws_col - 1u);
  const std::string line = "\r\033[K" + shown;
  (void)std::fwrite(line.data(), 1, line.size(), stderr);
  std::fflush(stderr);
}

bool draws() { return ::isatty(STDERR_FILENO) != 0; }

}  // namespace leeway
