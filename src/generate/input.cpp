#include "generate/input.h"

#include <iostream>
#include <iterator>

#include "base/files.h"

namespace leeway {

Input read_input(const std::string& path) {
  if (path != "-") return {path, read_file(path)};
  return {"standard input", std::string(std::istreambuf_iterator<char>(std::cin), {})};
}

}  // namespace leeway
