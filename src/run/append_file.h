// Files that grow line by line during a run.
#pragma once

#include <cstdint>
#include <string>

namespace leeway {

// A line is handed to the system when `append` returns and survives the end of the process. Every
// method throws Error naming the path and the reason. Used by one thread.
class AppendFile {
 public:
  AppendFile() = default;
  explicit AppendFile(const std::string& path);  // created if missing
  ~AppendFile();
  AppendFile(AppendFile&& other) noexcept;
  AppendFile& operator=(AppendFile&& other) noexcept;

  bool is_open() const { return file_ >= 0; }
  void append(const std::string& line);  // without its line break
  int64_t size() const;
  // Whether the path now names another file, or none: appended lines would be lost.
  bool is_gone() const;

 private:
  std::string path_;
  int file_ = -1;
};

// log.txt. It is at most `most_bytes` long and then becomes log.1.txt, in place of the one before;
// longer lines are cut. If someone removes or renames it, a new one is begun.
class LogFile {
 public:
  LogFile() = default;
  LogFile(const std::string& folder, int64_t most_bytes);
  void append(const std::string& line);

 private:
  std::string path_, older_;
  int64_t most_bytes_ = 0, size_ = 0;
  AppendFile file_;
};

// Removes step_N.jsonl files of a folder except the first and the newest, `keep` in total; 0 keeps
// all. Other files are left alone.
void keep_step_files(const std::string& folder, int64_t keep);

}  // namespace leeway
