// Whole files, read and written.
#pragma once

#include <string>
#include <string_view>

namespace leeway {

// The file's bytes. Throws Error naming the path and the reason.
std::string read_file(const std::string& path);

// Writes under a temporary name beside `path`, syncs and renames, so that `path` holds the old
// content or the new, never a part. Throws Error naming the path and the reason.
void write_file_atomically(const std::string& path, std::string_view content);

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
