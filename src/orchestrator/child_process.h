// One program in a child process, with pipes to its standard streams. The protocol is not known
// here.
//
// Between the two processes is a keeper (keeper_main.cpp), which ends together with everything that
// the program started, including children in other process groups and sessions, and also when this
// process is killed. Nothing here blocks.
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
  int64_t max_processes = 0;     // the program and everything it has started, at a time
};

// The beginning of a line that a process wrote, quoted for a message.
std::string in_quotes(std::string_view line);

// Owns a file descriptor.
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

// The keeper's program as an executable file in memory. Throws Error.
OpenFile make_keeper_file();

class ChildProcess {
 public:
  // Starts `command` with /bin/sh -c in this process's working directory. Lines of its stderr also
  // go to `log`, which outlives this object, as "PID: line"; the last 1000 are kept. `command_key`
  // is what messages call the command. Throws Error.
  ChildProcess(const std::string& command, const std::string& command_key,
               const ProcessLimits& limits, const OpenFile& keeper, std::deque<std::string>& log);

  // The pid of the program, or of its keeper until the keeper has reported it.
  pid_t pid();
  pid_t keeper_pid() const { return keeper_; }

  // Writes a line to its input. A closed reader does not raise SIGPIPE, which is blocked in the
  // calling thread meanwhile.
  void send(std::string_view line);
  void flush();
  void close_input() { input_.close(); }

  // Reads some of its output. Returns false if there is none at the moment.
  bool receive();
  // The first whole line received, without its end.
  std::optional<std::string> next_line();
  // The start of a line that is not complete yet, once next_line has none.
  std::string_view unfinished_line() const { return std::string_view(received_).substr(taken_); }
  bool output_open() const { return output_.open(); }

  // Whether it has ended with everything it started; it can still be waited for.
  bool exited() const;
  // Kills it with everything it started. True: it has been waited for. False: the keeper must still
  // be waited for, and ends within 10 s, usually at once.
  bool end();
  // How it ended, once it has been waited for: "ended with exit status 3", or which limit was hit.
  // Quotes `command` if the shell did not find it.
  std::string end_text() const;

  // "; it wrote to stderr: a | b", of the last 20 lines, or nothing.
  std::string last_words();
  // Adds a line of ours to those of its stderr.
  void note(const std::string& line);

 private:
  bool read_some(OpenFile& file, std::string& to);
  void read_errors();
  void read_reports();

  std::string command_, command_key_;
  ProcessLimits limits_;
  pid_t keeper_ = -1, program_ = -1;
  bool waited_for_ = false;
  int status_ = 0;
  OpenFile input_, output_, errors_, control_;
  std::string reports_, limit_;  // reports of the keeper; the limit that ended it
  int64_t limit_value_ = 0;
  std::string unsent_, received_, error_line_;
  // Bytes of received_ that were returned as lines, so that a short line does not move all that is
  // behind it, and bytes that have been searched for the end of a line.
  size_t taken_ = 0, searched_ = 0;
  std::deque<std::string> kept_;
  std::deque<std::string>& log_;
};

}  // namespace leeway
