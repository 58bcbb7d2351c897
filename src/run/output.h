// stdout is only for results; everything meant for a person goes to stderr.
//
// Messages often contain text from others, such as environments, data and file names; `printable`
// makes it safe for a terminal.
#pragma once

#include <chrono>
#include <string>
#include <string_view>
#include <vector>

namespace leeway {

// Writes to stdout, byte for byte unless that is a terminal; throws Error on failure (a full disk,
// a closed pipe).
void print(std::string_view text);
// One line to stderr: "leeway: warning: ..".
void warn(std::string_view text);
// One line to stderr. Write errors are ignored.
void say(std::string_view text);

// Whether stderr is a terminal, on which lines can be redrawn.
bool draws();
// Replaces the previous such line there; empty: removes it.
void redraw(std::string_view text);

// The left column is text, the others are right-aligned numbers, except "settings"; a rule below
// the header.
std::string format_table(const std::vector<std::string>& header,
                         const std::vector<std::vector<std::string>>& rows);

// Progress of `total` steps on stderr, with rate and time left: silent for the first two seconds,
// then a line that redraws itself on a terminal and plain lines, at most one every two seconds,
// elsewhere.
class Progress {
 public:
  Progress(std::string what, std::string unit);
  ~Progress();
  void update(size_t done, size_t total);

 private:
  std::string what_, unit_;
  std::chrono::steady_clock::time_point start_, last_;
  bool drawn_ = false;
};

}  // namespace leeway
