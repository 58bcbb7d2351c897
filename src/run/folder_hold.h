// Locks a folder for one process, and chooses the name of a new run.
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
  // Throws Error if the folder cannot be opened, or if another process holds it; `work` says what
  // that process does ("another process is at work on this run").
  FolderHold(const std::string& folder, const std::string& work);
  // Returns nothing if another process holds it.
  static std::optional<FolderHold> attempt(const std::string& folder);

  ~FolderHold();
  FolderHold(FolderHold&& other) noexcept : file_(std::exchange(other.file_, -1)) {}
  FolderHold& operator=(FolderHold&&) = delete;

 private:
  explicit FolderHold(int file) : file_(file) {}
  int file_;
};

inline constexpr const char* kAtWorkOnRun = "another process is at work on this run";

// Whether the folder contains a run, however early it ended.
bool holds_a_run(const std::string& folder);

struct ClaimedFolder {
  std::string name;
  FolderHold hold;
};
// A folder for a new run: `wanted`, or the first of NAME-2, NAME-3, .. that neither contains a run
// nor is held by another process. It is created if missing. Processes that start at the same moment
// get different folders. Throws Error if it cannot be created.
ClaimedFolder claim_folder(const std::string& wanted);

}  // namespace leeway
