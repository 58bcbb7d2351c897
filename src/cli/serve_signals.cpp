#include "cli/serve_signals.h"

#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdint>
#include <ctime>
#include <string_view>

namespace leeway {
namespace {

// A signal handler can only access statics.
volatile std::sig_atomic_t first_kind = 0;
volatile std::sig_atomic_t drain_descriptor = -1;
timespec first_time;
struct sigaction int_before, term_before;

constexpr int64_t kOneSignal = 200'000'000;  // nanoseconds

void on_serve_signal(int signal) {
  const int error = errno;
  timespec now = {};
  clock_gettime(CLOCK_MONOTONIC, &now);
  if (first_kind != 0) {
    const int64_t since =
        (now.tv_sec - first_time.tv_sec) * 1'000'000'000 + now.tv_nsec - first_time.tv_nsec;
    if (signal != first_kind || since > kOneSignal) _exit(128 + signal);
    return;
  }
  first_kind = signal;
  first_time = now;
  constexpr std::string_view kText =
      "leeway: answering the requests there are, then ending; once more to end at once\n";
  (void)!write(STDERR_FILENO, kText.data(), kText.size());
  const uint64_t one = 1;
  (void)!write(drain_descriptor, &one, sizeof one);
  errno = error;
}

}  // namespace

ServeSignals::ServeSignals(int drain_fd) {
  first_kind = 0;
  drain_descriptor = drain_fd;
  struct sigaction action = {};
  action.sa_handler = on_serve_signal;
  action.sa_flags = SA_RESTART;
  sigaction(SIGINT, &action, &int_before);
  sigaction(SIGTERM, &action, &term_before);
}

ServeSignals::~ServeSignals() {
  sigaction(SIGINT, &int_before, nullptr);
  sigaction(SIGTERM, &term_before, nullptr);
}

}  // namespace leeway
