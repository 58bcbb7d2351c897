// One program in a process of its own, with pipes to its standard streams. What is said over them
// is not known here.
//
// Between it and this process is a keeper (keeper_main.cpp), which ends with everything that the
// program started: children in groups and sessions of their own among them, and also when this
// process is killed. Nothing here waits.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace leeway {

// 0: no limit.
struct ProcessLimits {
  int64_t max_memory_bytes = 0;  // address space of each process
  int64_t max_cpu_seconds = 0;   // of each process, over its life
  int64_t max_processes = 0;     // the program and all that it has started, at a time
};

// The beginning of what a process wrote, in quotes, fit for a message.
std::string in_quotes(std::string_view line);

// An open file, closed with it.
class OpenFile {
 public:
  explicit OpenFile(int descriptor = -1) : descriptor_(descriptor) {}
  ~OpenFile() { close(); }
  OpenFile(OpenFile&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  OpenFile& operator=(OpenFile&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }
  void close();
  int get() const { return descriptor_; }
  bool open() const { return descriptor_ >= 0; }

 private:
  int descriptor_;
};

// The keeper's program as a file that can be run, in memory. Throws Error.
OpenFile make_keeper_file();

class ChildProcess {
 public:
  // Starts `command` by /bin/sh -c, in this process's working directory. Lines of its stderr go to
  // `log` too, "PID: line", which outlives this; the last 1000 of them. Throws Error.
  ChildProcess(const std::string& command, const ProcessLimits& limits, const OpenFile& keeper,
               std::deque<std::string>& log);

  // Of the program; of its keeper until that has told.
  pid_t pid();
  pid_t keeper_pid() const { return keeper_; }

  // A line to its input. A reader that is gone raises no SIGPIPE: the signal is blocked in the
  // calling thread for that moment.
  void send(std::string_view line);
  void flush();
  void close_input() { input_.close(); }

  // Reads a piece of its output. False: there is none at the moment.
  bool receive();
  // The first whole line received, without its end.
  std::optional<std::string> next_line();
  // Of a line that has no end yet.
  const std::string& unfinished_line() const { return received_; }
  bool output_open() const { return output_.open(); }

  // Has ended, with all that it started; it can still be waited for.
  bool exited() const;
  // Has it killed with all that it started. True: it has been waited for; false: the keeper must
  // be, and ends within 10 s, mostly at once.
  bool end();
  // How it ended, for one that has been waited for: "ended with exit status 3", or which limit it
  // was. `command` is quoted where the shell did not find it.
  std::string end_text() const;

  // "; it wrote to stderr: a | b", of the last 20 lines, or nothing.
  std::string last_words();
  // A line of ours among those of its stderr.
  void note(const std::string& line);

 private:
  bool read_some(OpenFile& file, std::string& to);
  void read_errors();
  void read_reports();

  std::string command_;
  ProcessLimits limits_;
  pid_t keeper_ = -1, program_ = -1;
  bool waited_for_ = false;
  int status_ = 0;
  OpenFile input_, output_, errors_, control_;
  std::string reports_, limit_;  // of the keeper; the limit that ended it
  int64_t limit_value_ = 0;
  std::string unsent_, received_, error_line_;
  size_t searched_ = 0;  // bytes of received_ without a line's end
  std::deque<std::string> kept_;
  std::deque<std::string>& log_;
};

}  // namespace leeway
