// The page that `leeway trajectory --html` writes.
#pragma once

#include <string>
#include <string_view>

namespace leeway {

// One HTML file that opens offline and shows every token of every sample, coloured by who produced
// it, and each break with its reason. `trajectory_json` is the text of `leeway trajectory --json`;
// nothing in it can break out of the script element that holds it.
std::string trajectory_page(std::string_view trajectory_json);

}  // namespace leeway
