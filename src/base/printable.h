// Making untrusted text safe to print on a terminal.
#pragma once

#include <string>
#include <string_view>

namespace leeway {

// Escapes everything that could control a terminal or disguise the text: control characters other
// than newline and tab, and marks that change the writing direction, as \u001b; bytes that are not
// UTF-8 as \xff. JSON stays JSON, since its strings contain no such bytes.
std::string printable(std::string_view text);

// The first characters of a printable text that fit into `columns` of a terminal, each taken to be
// one wide, with "..." at the end where some are left out.
std::string fitting(std::string text, size_t columns);

}  // namespace leeway
