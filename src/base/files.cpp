#include "base/files.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "leeway/error.h"

namespace leeway {
namespace {

[[noreturn]] void fail(const std::string& path, const char* doing) {
  throw Error(fmt::format("{}: cannot {}: {}", path, doing, std::strerror(errno)));
}

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

}  // namespace

bool is_present(const std::string& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) == 0) return true;
  if (errno != ENOENT && errno != ENOTDIR) fail(path, "access");
  return false;
}

int open_regular_file(const std::string& path, uint64_t* size) {
  // Without O_NONBLOCK, opening a pipe would block until it has a writer.
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  // Opening a socket fails with ENXIO.
  if (fd < 0 && errno == ENXIO) throw Error(fmt::format("{}: is not a regular file", path));
  if (fd < 0) fail(path, "open");
  struct stat status {};
  const int unknown = ::fstat(fd, &status) != 0 ? errno : 0;
  if (unknown == 0 && S_ISREG(status.st_mode)) {
    *size = static_cast<uint64_t>(status.st_size);
    return fd;
  }
  ::close(fd);
  errno = unknown != 0 ? unknown : EISDIR;
  if (unknown != 0 || S_ISDIR(status.st_mode)) fail(path, "read");
  throw Error(fmt::format("{}: is not a regular file", path));
}

std::string read_file(const std::string& path) {
  uint64_t size = 0;
  const bool standard_input = path == "/dev/stdin" || path == "/dev/fd/0";
  const Descriptor file(standard_input ? ::open(path.c_str(), O_RDONLY | O_CLOEXEC)
                                       : open_regular_file(path, &size));
  if (file.get() < 0) fail(path, "open");
  std::string content;
  content.reserve(static_cast<size_t>(size) + 1);
  char buffer[1 << 16];
  for (;;) {
    const ssize_t got = ::read(file.get(), buffer, sizeof buffer);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail(path, "read");
    if (got == 0) return content;
    content.append(buffer, static_cast<size_t>(got));
  }
}

FileSum write_file_atomically(const std::string& path, std::string_view content) {
  FileWriter file(path);
  file.write(content.data(), content.size());
  return file.commit();
}

}  // namespace leeway
