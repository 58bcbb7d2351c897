// stdout is the result and nothing else; everything said to a person goes to stderr.
//
// What others wrote, such as environments, data and the names of files, is in much of what is said;
// it reaches a terminal as `printable` of base makes it.
#pragma once

#include <chrono>
#include <string>
#include <string_view>
#include <vector>

namespace leeway {

// Writes to stdout, byte for byte unless that is a terminal; throws Error if that fails (a full
// disk, a closed pipe).
void print(std::string_view text);
// One line to stderr: "leeway: warning: ..".
void warn(std::string_view text);
// One line to stderr. Where that cannot be written nothing happens.
void say(std::string_view text);

// Whether stderr is a terminal, on which lines can be drawn again.
bool draws();
// A line there in the place of the one before, if that was one of these too; empty: it goes.
void redraw(std::string_view text);

// Left column text, the others right-aligned numbers, but for "settings"; a rule below the header.
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
