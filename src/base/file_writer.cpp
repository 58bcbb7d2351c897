#include "base/file_writer.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "leeway/error.h"

namespace leeway {
namespace {

constexpr size_t kPiece = size_t{1}
                          << 20;  // small enough that the checksum reads it from the cache

}  // namespace

FileWriter::FileWriter(const std::string& path)
    : path_(path), temporary_(fmt::format("{}.{}.tmp", path, ::getpid())) {
  file_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (file_ < 0) fail("create");
}

FileWriter::~FileWriter() {
  if (file_ >= 0) ::close(file_);
  if (!committed_) ::unlink(temporary_.c_str());
}

void FileWriter::fail(const char* doing) const {
  throw Error(fmt::format("{}: cannot {}: {}", path_, doing, std::strerror(errno)));
}

void FileWriter::write(const void* data, size_t size) {
  const char* at = static_cast<const char*>(data);
  while (size > 0) {
    const ssize_t put = ::write(file_, at, std::min(size, kPiece));
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) fail("write");
    const auto length = static_cast<size_t>(put);
    sum_.add({at, length});
    bytes_ += length;
    at += length;
    size -= length;
  }
}

FileSum FileWriter::commit() {
  if (::fsync(file_) != 0) fail("write");
  const int file = file_;
  file_ = -1;
  if (::close(file) != 0) fail("write");
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail("write");
  committed_ = true;
  sync_folder();
  return {bytes_, sum_.value()};
}

// The rename is durable only once the directory itself is synced.
void FileWriter::sync_folder() const {
  const size_t slash = path_.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : path_.substr(0, slash + 1);
  const int file = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (file < 0) return;  // the folder may be writable but not readable
  // Some file systems cannot sync a directory and report EINVAL or ENOTSUP.
  const bool failed = ::fsync(file) != 0 && errno != EINVAL && errno != ENOTSUP;
  const int reason = errno;
  ::close(file);
  errno = reason;
  if (failed) fail("sync the folder of");
}

}  // namespace leeway
