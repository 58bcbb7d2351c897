#include "run/folder_hold.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "leeway/error.h"

namespace leeway {
namespace {

namespace fs = std::filesystem;

constexpr int kHeld = -1;

bool is_there(const std::string& path) {
  std::error_code ignored;  // opening it later reports the error
  return fs::exists(path, ignored);
}

// Whether the path still refers to the open folder.
bool stands_at(int file, const std::string& folder) {
  struct stat open = {}, there = {};
  return ::fstat(file, &open) == 0 && ::stat(folder.c_str(), &there) == 0 &&
         open.st_dev == there.st_dev && open.st_ino == there.st_ino;
}

// The locked folder, or kHeld.
int locked(const std::string& folder) {
  while (true) {
    const int file = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (file < 0) throw Error(fmt::format("{}: cannot open: {}", folder, std::strerror(errno)));
    const bool held = ::flock(file, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
    if (!held && stands_at(file, folder)) return file;
    ::close(file);
    if (held) return kHeld;
  }
}

void make_folder(const std::string& folder, const std::string& wanted) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) throw Error(fmt::format("output_dir = \"{}\": {}", wanted, error.message()));
}

}  // namespace

FolderHold::FolderHold(const std::string& folder, const std::string& work) : file_(locked(folder)) {
  if (file_ == kHeld) throw Error(fmt::format("{}: {}; wait for it or end it", folder, work));
}

std::optional<FolderHold> FolderHold::attempt(const std::string& folder) {
  const int file = locked(folder);
  if (file == kHeld) return std::nullopt;
  return FolderHold(file);
}

FolderHold::~FolderHold() {
  if (file_ >= 0) ::close(file_);
}

bool holds_a_run(const std::string& folder) {
  return is_there(folder + "/metrics.jsonl") || is_there(folder + "/sft.jsonl") ||
         is_there(folder + "/identity.json");
}

ClaimedFolder claim_folder(const std::string& wanted) {
  std::string plain = wanted;
  while (plain.size() > 1 && plain.ends_with('/')) plain.pop_back();
  for (int n = 1;; ++n) {
    const std::string folder = n == 1 ? plain : fmt::format("{}-{}", plain, n);
    if (holds_a_run(folder)) continue;
    make_folder(folder, wanted);
    // Whoever holds the lock and sees no run may start one: others that checked at the same moment
    // are refused the lock, or find a run once they have it.
    std::optional<FolderHold> hold = FolderHold::attempt(folder);
    if (hold && !holds_a_run(folder)) return {folder, std::move(*hold)};
  }
}

}  // namespace leeway
