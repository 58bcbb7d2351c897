// Signals of a server: the first SIGTERM or SIGINT drains it, the second ends the program at once.
#pragma once

namespace leeway {

// Handles them while it lives; the handlers of before come back after it. One at a time. Two of a
// kind within a fifth of a second count as one, since wrappers forward what the terminal sends to
// all.
class ServeSignals {
 public:
  // Eight bytes are written to `drain_fd` at the first signal.
  explicit ServeSignals(int drain_fd);
  ~ServeSignals();
  ServeSignals(const ServeSignals&) = delete;
  ServeSignals& operator=(const ServeSignals&) = delete;
};

}  // namespace leeway
