// Text of others on a terminal.
#pragma once

#include <string>
#include <string_view>

namespace leeway {

// The text with everything that could steer a terminal or hide what it says written out: control
// characters other than newline and tab, and the marks that change the direction of writing, as
// \u001b; bytes that are no UTF-8 as \xff. JSON stays JSON, since its strings hold no such bytes.
std::string printable(std::string_view text);

}  // namespace leeway
