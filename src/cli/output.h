// stdout is the result and nothing else; everything said to a person goes to stderr.
//
// What others wrote, such as environments, data and the names of files, is in much of what is said;
// it reaches a terminal as `printable` of base makes it.
#pragma once

#include <string_view>

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

}  // namespace leeway
