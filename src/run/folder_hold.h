// A folder that one process works on, and the name that a new run gets.
#pragma once

#include <optional>
#include <string>
#include <utility>

namespace leeway {

// A lock that ends with the process, however that ends. It locks the folder that is at the path
// when the lock is granted: one that was moved or replaced meanwhile is opened again. On a file
// system without locks nothing is locked.
class FolderHold {
 public:
  // Throws Error: the folder cannot be opened, or another process holds it; `work` says what that
  // process is busy with ("another process is at work on this run").
  FolderHold(const std::string& folder, const std::string& work);
  // Nothing: another process holds it.
  static std::optional<FolderHold> attempt(const std::string& folder);

  ~FolderHold();
  FolderHold(FolderHold&& other) noexcept : file_(std::exchange(other.file_, -1)) {}
  FolderHold& operator=(FolderHold&&) = delete;

 private:
  explicit FolderHold(int file) : file_(file) {}
  int file_;
};

inline constexpr const char* kAtWorkOnRun = "another process is at work on this run";

// Whether the folder is that of a run, however early it ended.
bool holds_a_run(const std::string& folder);

struct ClaimedFolder {
  std::string name;
  FolderHold hold;
};
// A folder for a new run: `wanted`, or the first of NAME-2, NAME-3, .. that neither holds a run nor
// is held by another process. It is made where it is not there. Processes that start at the same
// moment each get one of their own. Throws Error where it cannot be made.
ClaimedFolder claim_folder(const std::string& wanted);

}  // namespace leeway
