// Input of a command: a file, or standard input.
#pragma once

#include <string>

namespace leeway {

struct Input {
  std::string name;  // for messages: the path, or "standard input"
  std::string text;
};

// `path` "-": standard input, to its end. Throws Error naming a file that cannot be read.
Input read_input(const std::string& path);

}  // namespace leeway
