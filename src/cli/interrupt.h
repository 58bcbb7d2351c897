// Ctrl-C during a run: once, the step in progress is finished and everything saved; twice, the
// program ends at once. Two of a kind within a fifth of a second are one: wrappers pass
// on what the terminal sends to all. A terminal that goes away (SIGHUP) asks once, however often it
// is sent, and not at all where it was ignored before, as nohup does.
#pragma once

namespace leeway {

// Handles SIGINT, SIGTERM and SIGHUP from the first `asked` on, while it lives: before there is
// anything to save, they end the program at once. The handlers of before come back after it. One at
// a time.
class Interrupt {
 public:
  Interrupt() = default;
  ~Interrupt();
  Interrupt(const Interrupt&) = delete;
  Interrupt& operator=(const Interrupt&) = delete;

  bool asked();

 private:
  bool handles_ = false;
};

}  // namespace leeway
