// What options that take a seed check.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace leeway {

// For seeds: the command line's parser takes -1 for the largest number there is.
inline CLI::Validator not_negative() {
  return CLI::Validator(
      [](std::string& text) {
        return text.find('-') == std::string::npos ? "" : text + ": must not be negative";
      },
      "");
}

}  // namespace leeway
