// A small disk for tests of a full one: a tmpfs in mounts of this process's own, so that nothing
// stays mounted when it ends. Needs the right to mount, which root has outside of most containers,
// and everybody where the system lets users have namespaces of their own.
#pragma once

#include <fcntl.h>
#include <sched.h>
#include <sys/mount.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <string>

namespace leeway::testing {

inline bool write_whole(const char* path, const std::string& text) {
  const int file = ::open(path, O_WRONLY | O_CLOEXEC);
  if (file < 0) return false;
  const bool done = ::write(file, text.data(), text.size()) == static_cast<ssize_t>(text.size());
  ::close(file);
  return done;
}

// In a namespace of its own every user may mount. It is this one user's: the others stay without a
// number in it.
inline bool have_mounts_of_ones_own() {
  const std::string user = std::to_string(::geteuid()), group = std::to_string(::getegid());
  if (::unshare(CLONE_NEWNS) == 0) return true;
  return ::unshare(CLONE_NEWUSER | CLONE_NEWNS) == 0 &&
         write_whole("/proc/self/setgroups", "deny") &&
         write_whole("/proc/self/uid_map", user + " " + user + " 1") &&
         write_whole("/proc/self/gid_map", group + " " + group + " 1");
}

// Keeps what this process mounts from everybody else. In a chroot "/" is not a mount point and
// cannot be made private; the folder above it that is one is reached by leaving the chroot for that
// moment:
// ".." leads out of it for who stands outside the root of the moment.
inline bool make_mounts_private(const std::string& any_folder) {
  if (!have_mounts_of_ones_own()) return false;
  if (::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0) return true;
  if (errno != EINVAL) return false;
  const std::filesystem::path here = std::filesystem::current_path();
  const int root = ::open("/", O_PATH | O_DIRECTORY | O_CLOEXEC);
  bool done = root >= 0 && ::chroot(any_folder.c_str()) == 0 && ::fchdir(root) == 0;
  for (int up = 0; done && up < 64; ++up) done = ::chdir("..") == 0;
  done = done && ::chroot(".") == 0 &&
         ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0;
  const bool is_back =
      root >= 0 && ::fchdir(root) == 0 && ::chroot(".") == 0 && ::chdir(here.c_str()) == 0;
  if (root >= 0) ::close(root);
  return done && is_back;
}

inline bool mount_small_disk(const std::string& folder, const std::string& size) {
  return make_mounts_private(folder) &&
         ::mount("none", folder.c_str(), "tmpfs", 0, ("size=" + size).c_str()) == 0;
}

inline bool resize_small_disk(const std::string& folder, const std::string& size) {
  return ::mount("none", folder.c_str(), "tmpfs", MS_REMOUNT, ("size=" + size).c_str()) == 0;
}

}  // namespace leeway::testing
