// Checking for, reading and writing whole files.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/file_writer.h"

namespace leeway {

// Whether there is a file or folder at `path`; a dangling link counts as absent. Throws Error
// naming the path and the reason if the system cannot tell (no permission, name too long, link
// loop).
bool is_present(const std::string& path);

// The file's bytes. Throws Error naming the path and the reason. Pipes, sockets and devices are
// refused, since reading them may block or never end; standard input is read whatever it is.
std::string read_file(const std::string& path);

// Opens a file for reading and returns its descriptor, which the caller closes, and its size.
// Throws Error as `read_file` does, and never blocks.
int open_regular_file(const std::string& path, uint64_t* size);

// Writes under a temporary name beside `path`, syncs and renames, so that `path` holds either the
// old content or the new. Throws Error naming the path and the reason. Returns the file's size and
// checksum, for manifests.
FileSum write_file_atomically(const std::string& path, std::string_view content);

// Calls use(number, line) for each nonblank line of a text; numbers count from 1.
template <class Use>
void for_each_line(std::string_view text, Use&& use) {
  size_t number = 0;
  while (!text.empty()) {
    const size_t end = text.find('\n');
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
    ++number;
    if (line.find_first_not_of(" \t\r") != std::string_view::npos) use(number, line);
  }
}

}  // namespace leeway
