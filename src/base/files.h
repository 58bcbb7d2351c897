// Whole files, looked for, read and written.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/file_writer.h"

namespace leeway {

// Whether there is a file or folder at `path`; a link that leads nowhere is none. Throws Error
// naming the path and the reason where the system does not tell: no permission, a name too long, a
// loop.
bool is_present(const std::string& path);

// The file's bytes. Throws Error naming the path and the reason. Pipes, sockets and devices are no
// files: they may block, or never end. What stands at standard input is read whatever it is.
std::string read_file(const std::string& path);

// A descriptor for reading, the caller's to close, and the file's size. Throws Error as `read_file`
// does, and never waits.
int open_regular_file(const std::string& path, uint64_t* size);

// Writes under a temporary name beside `path`, syncs and renames, so that `path` holds the old
// content or the new, never a part. Throws Error naming the path and the reason. What was written,
// for manifests.
FileSum write_file_atomically(const std::string& path, std::string_view content);

// Calls use(number, line) for each line of a text that is not blank; numbers count from 1.
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
