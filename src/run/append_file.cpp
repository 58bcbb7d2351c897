#include "run/append_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <string_view>
#include <utility>

#include "leeway/error.h"
#include "report/step_files.h"

namespace leeway {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void fail(const std::string& path, const char* doing) {
  throw Error(fmt::format("{}: cannot {}: {}", path, doing, std::strerror(errno)));
}

}  // namespace

AppendFile::AppendFile(const std::string& path)
    : path_(path), file_(::open(path.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644)) {
  if (file_ < 0) fail(path, "open");
}

AppendFile::~AppendFile() {
  if (file_ >= 0) ::close(file_);
}

AppendFile::AppendFile(AppendFile&& other) noexcept
    : path_(std::move(other.path_)), file_(std::exchange(other.file_, -1)) {}

AppendFile& AppendFile::operator=(AppendFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(file_, other.file_);
  return *this;
}

void AppendFile::append(const std::string& line) {
  const std::string text = line + "\n";
  for (std::string_view left = text; !left.empty();) {
    const ssize_t put = ::write(file_, left.data(), left.size());
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) fail(path_, "write");
    left.remove_prefix(static_cast<size_t>(put));
  }
}

int64_t AppendFile::size() const {
  struct stat status {};
  return ::fstat(file_, &status) == 0 ? static_cast<int64_t>(status.st_size) : 0;
}

bool AppendFile::is_gone() const {
  struct stat open {
  }, named{};
  if (::fstat(file_, &open) != 0) fail(path_, "read");
  if (::stat(path_.c_str(), &named) != 0) return errno == ENOENT || errno == ENOTDIR;
  return open.st_dev != named.st_dev || open.st_ino != named.st_ino;
}

LogFile::LogFile(const std::string& folder, int64_t most_bytes)
    : path_(folder + "/log.txt"),
      older_(folder + "/log.1.txt"),
      most_bytes_(most_bytes),
      file_(path_) {
  size_ = file_.size();
}

void LogFile::append(const std::string& line) {
  std::error_code ignored;
  // Without its folder there is nothing to rotate: the run ends at its next step.
  const bool has_folder = fs::exists(fs::path(path_).parent_path(), ignored);
  if (has_folder && file_.is_gone()) {
    file_ = AppendFile(path_);
    size_ = file_.size();
  }
  const std::string cut = line.substr(0, static_cast<size_t>(most_bytes_ - 1));
  const auto length = static_cast<int64_t>(cut.size()) + 1;
  if (has_folder && size_ > 0 && size_ + length > most_bytes_) {
    fs::rename(path_, older_, ignored);
    file_ = AppendFile(path_);
    size_ = file_.size();
  }
  file_.append(cut);
  size_ += length;
}

void keep_step_files(const std::string& folder, int64_t keep) {
  if (keep <= 0) return;
  std::vector<StepFile> files = step_files(folder);
  // Removes the second oldest until `keep` are left: the first and the newest stay.
  auto oldest = files.begin();
  if (keep > 1 && oldest != files.end()) ++oldest;
  std::error_code ignored;
  for (auto count = static_cast<int64_t>(files.size()); count > keep; --count, ++oldest) {
    fs::remove(oldest->path, ignored);
  }
}

}  // namespace leeway
