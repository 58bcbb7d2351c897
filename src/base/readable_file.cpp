#include "base/readable_file.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/files.h"
#include "leeway/error.h"

namespace leeway {

ReadableFile::ReadableFile(const std::string& path)
    : path_(path), fd_(open_regular_file(path, &size_)) {}
ReadableFile::~ReadableFile() { ::close(fd_); }

void ReadableFile::read(uint64_t at, std::span<std::byte> out) const {
  while (!out.empty()) {
    const ssize_t got = ::pread(fd_, out.data(), out.size(), static_cast<off_t>(at));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw Error(fmt::format("{}: cannot read: {}", path_, std::strerror(errno)));
    if (got == 0) {
      throw Error(fmt::format(
          "{}: ends at byte {} but had {} bytes when it was opened; another program truncated it",
          path_, at, size_));
    }
    at += static_cast<uint64_t>(got);
    out = out.subspan(static_cast<size_t>(got));
  }
}

}  // namespace leeway
