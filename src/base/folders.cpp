#include "base/folders.h"

#include <dirent.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "leeway/error.h"

namespace leeway {
namespace {

[[noreturn]] void fail(const std::string& path, const char* doing) {
  throw Error(fmt::format("{}: cannot {}: {}", path, doing, std::strerror(errno)));
}

}  // namespace

bool path_exists(const std::string& path) {
  struct stat status {};
  return ::lstat(path.c_str(), &status) == 0;
}

std::string absolute_path(const std::string& path) {
  const std::unique_ptr<char, void (*)(void*)> found(::realpath(path.c_str(), nullptr), &::free);
  if (found == nullptr) fail(path, "find");
  return found.get();
}

bool is_folder(const std::string& path) {
  struct stat status {};
  return ::stat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode);
}

bool same_path(const std::string& a, const std::string& b) {
  struct stat first {
  }, second{};
  return ::stat(a.c_str(), &first) == 0 && ::stat(b.c_str(), &second) == 0 &&
         first.st_dev == second.st_dev && first.st_ino == second.st_ino;
}

void make_folders(const std::string& path) {
  if (::mkdir(path.c_str(), 0777) == 0) return;
  if (errno == EEXIST && is_folder(path)) return;
  const size_t slash = path.find_last_not_of('/') == std::string::npos
                           ? std::string::npos
                           : path.rfind('/', path.find_last_not_of('/'));
  if (errno != ENOENT || slash == std::string::npos || slash == 0) fail(path, "create");
  make_folders(path.substr(0, slash));
  if (::mkdir(path.c_str(), 0777) != 0 && !(errno == EEXIST && is_folder(path))) {
    fail(path, "create");
  }
}

std::vector<std::string> folder_names(const std::string& path) {
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(::opendir(path.c_str()), &::closedir);
  if (folder == nullptr) fail(path, "list");
  std::vector<std::string> names;
  for (errno = 0; const dirent* entry = ::readdir(folder.get()); errno = 0) {
    const std::string name = entry->d_name;
    if (name != "." && name != "..") names.push_back(name);
  }
  if (errno != 0) fail(path, "list");
  std::sort(names.begin(), names.end());
  return names;
}

void remove_tree(const std::string& path) {
  struct stat status {};
  if (::lstat(path.c_str(), &status) != 0) {
    if (errno == ENOENT) return;
    fail(path, "remove");
  }
  if (S_ISDIR(status.st_mode)) {
    for (const std::string& name : folder_names(path)) remove_tree(path + "/" + name);
    if (::rmdir(path.c_str()) != 0 && errno != ENOENT) fail(path, "remove");
  } else if (::unlink(path.c_str()) != 0 && errno != ENOENT) {
    fail(path, "remove");
  }
}

}  // namespace leeway
