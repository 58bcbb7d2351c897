// A file read at chosen places. It is read, not mapped, so if another program truncates it
// meanwhile, that is an error, not a signal.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace leeway {

// Every method throws Error naming the path and the reason. Thread-safe.
class ReadableFile {
 public:
  explicit ReadableFile(const std::string& path);
  ~ReadableFile();
  ReadableFile(const ReadableFile&) = delete;
  ReadableFile& operator=(const ReadableFile&) = delete;

  const std::string& path() const { return path_; }
  uint64_t size() const { return size_; }  // when it was opened
  // Fills `out` with the bytes from `at` on.
  void read(uint64_t at, std::span<std::byte> out) const;

 private:
  std::string path_;
  uint64_t size_ = 0;
  int fd_;
};

}  // namespace leeway
