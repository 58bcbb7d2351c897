// Ctrl-C during a run: the first one finishes the current step and saves everything; the second
// ends the program at once. Two of a kind within a fifth of a second count as one, since wrappers
// forward what the terminal sends to all. A terminal that disappears (SIGHUP) counts as one
// request, however often it is sent, and is ignored if it was ignored before, as under nohup.
#pragma once

#include <string_view>

namespace leeway {

// Handles SIGINT, SIGTERM and SIGHUP from the first `asked` on, while it lives: before there is
// anything to save, they end the program at once. The handlers of before come back after it. One at
// a time.
class Interrupt {
 public:
  // `answer` is said at the first request; it must live as long as the program.
  explicit Interrupt(std::string_view answer = "finishing this step, then saving")
      : answer_(answer) {}
  ~Interrupt();
  Interrupt(const Interrupt&) = delete;
  Interrupt& operator=(const Interrupt&) = delete;

  bool asked();

 private:
  std::string_view answer_;
  bool handles_ = false;
};

}  // namespace leeway
