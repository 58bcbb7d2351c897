// The runs of a sweep as processes of this very program.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace leeway {

// Those that are left when it goes are killed: nothing of an unfinished run is kept, so there is
// nothing to save. Must be used in a process of one thread, since it forks.
class SweepProcesses {
 public:
  struct Ended {
    size_t run;
    int status;  // of waitpid
    double seconds;
  };

  // `in_child` is called in each new process before the program starts there; may be empty.
  explicit SweepProcesses(std::function<void()> in_child) : in_child_(std::move(in_child)) {}
  ~SweepProcesses();
  SweepProcesses(const SweepProcesses&) = delete;
  SweepProcesses& operator=(const SweepProcesses&) = delete;

  size_t count() const { return processes_.size(); }
  // Starts this program with `args`, its name first. Throws Error where it cannot be started.
  void start(size_t run, std::vector<std::string> args, const std::string& out,
             const std::string& err);
  // One that has ended since, if any.
  std::optional<Ended> reap();

 private:
  struct Process {
    pid_t pid;
    size_t run;
    std::chrono::steady_clock::time_point start;
  };

  std::function<void()> in_child_;
  std::vector<Process> processes_;
};

}  // namespace leeway
