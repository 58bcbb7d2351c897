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

}  // namespace leeway
