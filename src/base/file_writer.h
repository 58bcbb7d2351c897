// Writes a file in pieces, computing its checksum on the way; it appears whole or not at all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/crc32c.h"

namespace leeway {

// A file's entry in a manifest.
struct FileSum {
  uint64_t bytes = 0;
  uint32_t crc32c = 0;
  bool operator==(const FileSum&) const = default;
};

// Writes to a temporary name beside `path`. `commit` renames it to `path`; without a commit the
// temporary file is removed. Every method throws Error naming the path and the reason.
class FileWriter {
 public:
  explicit FileWriter(const std::string& path);
  ~FileWriter();
  FileWriter(const FileWriter&) = delete;
  FileWriter& operator=(const FileWriter&) = delete;

  void write(const void* data, size_t size);
  // Syncs and renames, so that `path` holds either the old content or the new, even after a power
  // failure.
  FileSum commit();

 private:
  [[noreturn]] void fail(const char* doing) const;
  void sync_folder() const;

  std::string path_, temporary_;
  int file_ = -1;
  bool committed_ = false;
  uint64_t bytes_ = 0;
  Crc32c sum_;
};

}  // namespace leeway
