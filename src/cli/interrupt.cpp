#include "cli/interrupt.h"

#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <ctime>
#include <string_view>
#include <utility>

namespace leeway {
namespace {

// A signal handler can only access statics.
volatile std::sig_atomic_t asked_to_stop = 0;  // the signal received
timespec first_signal;
std::string_view answer_to_signal;
volatile std::sig_atomic_t hung_up = 0;
struct sigaction previous_int, previous_term, previous_hup;

// Wrappers forward a signal that the terminal has already sent: two of a kind within this time
// count as one.
constexpr int64_t kSameSignal = 200'000'000;  // nanoseconds

int64_t since_first_signal() {
  timespec now = {};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (now.tv_sec - first_signal.tv_sec) * 1'000'000'000 + now.tv_nsec - first_signal.tv_nsec;
}

// Shells, terminals and login managers send this any number of times, before or after SIGTERM: it
// never counts as the second signal that ends the program at once.
void on_hangup(int) { hung_up = 1; }

void on_signal(int signal) {
  if (asked_to_stop != 0) {
    if (signal != asked_to_stop || since_first_signal() > kSameSignal) _exit(128 + signal);
    return;
  }
  clock_gettime(CLOCK_MONOTONIC, &first_signal);
  asked_to_stop = signal;
  for (const std::string_view text : {std::string_view("\nleeway: "), answer_to_signal,
                                      std::string_view("; once more to stop at once\n")}) {
    (void)!write(STDERR_FILENO, text.data(), text.size());
  }
}

}  // namespace

Interrupt::~Interrupt() {
  if (!handles_) return;
  sigaction(SIGINT, &previous_int, nullptr);
  sigaction(SIGTERM, &previous_term, nullptr);
  sigaction(SIGHUP, &previous_hup, nullptr);
}

bool Interrupt::asked() {
  if (!std::exchange(handles_, true)) {
    asked_to_stop = 0;
    hung_up = 0;
    answer_to_signal = answer_;
    struct sigaction action = {};
    action.sa_handler = on_signal;
    sigaction(SIGINT, &action, &previous_int);
    sigaction(SIGTERM, &action, &previous_term);
    sigaction(SIGHUP, nullptr, &previous_hup);
    action.sa_handler = on_hangup;
    // Under nohup the run continues.
    if (previous_hup.sa_handler != SIG_IGN) sigaction(SIGHUP, &action, nullptr);
  }
  return asked_to_stop != 0 || hung_up != 0;
}

}  // namespace leeway
