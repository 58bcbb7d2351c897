// The signals of a sweep, which waits for its runs and for the user at once.
#pragma once

#include <csignal>

namespace leeway {

// Blocks SIGINT, SIGTERM, SIGHUP and SIGCHLD while it lives: they are received in `wait` and
// nowhere else.
class SweepSignals {
 public:
  SweepSignals();
  ~SweepSignals();
  SweepSignals(const SweepSignals&) = delete;
  SweepSignals& operator=(const SweepSignals&) = delete;

  // Waits until a child has ended, or half a second. True: the user wants everything to end. From
  // then on such signals are ignored: a second one, from an impatient user or sent to the whole
  // process group, must not end the program before it has cleaned up and said so.
  bool wait() const;
  // In a child process: its signals are as they were before.
  void restore() const;

 private:
  sigset_t set_, previous_;
  struct sigaction previous_child_;
};

}  // namespace leeway
