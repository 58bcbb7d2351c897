#include "generate/input.h"

#include <fmt/format.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "base/files.h"
#include "leeway/error.h"

namespace leeway {

Input read_input(const std::string& path) {
  if (path != "-") return {path, read_file(path)};
  Input input{"standard input", ""};
  char bytes[1 << 16];
  while (const size_t got = std::fread(bytes, 1, sizeof bytes, stdin)) {
    input.text.append(bytes, got);
  }
  if (std::ferror(stdin) != 0) {
    throw Error(fmt::format("{}: cannot read: {}", input.name, std::strerror(errno)));
  }
  return input;
}

}  // namespace leeway
