// stdout is only for results; everything meant for a person goes to stderr.
//
// Messages often contain text from others, such as environments, data and file names; `printable`
// makes it safe for a terminal.
#pragma once

#include <string_view>

#include "leeway/error.h"

namespace leeway {

// Thrown by print: not about what was asked for, but about where the result goes.
class OutputError : public Error {
 public:
  using Error::Error;
};

// Writes to stdout, byte for byte unless that is a terminal; throws OutputError on failure (a full
// disk, a closed pipe).
void print(std::string_view text);
// A piece of a result, shown at once; dim where stdout is a terminal.
void print_piece(std::string_view text, bool dim);
// One line to stderr: "leeway: warning: ..".
void warn(std::string_view text);
// One line to stderr. Write errors are ignored.
void say(std::string_view text);

// Whether stderr is a terminal, on which lines can be redrawn.
bool draws();
// Replaces the previous such line there; empty: removes it. What does not fit into the terminal's
// width is left out.
void redraw(std::string_view text);

}  // namespace leeway
