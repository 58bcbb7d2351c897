#include "cli/interrupt.h"

#include <unistd.h>
#include <csignal>

#include <string_view>

namespace leeway {
namespace {

// A signal handler sees nothing but statics.
volatile std::sig_atomic_t asked_to_stop = 0;
struct sigaction previous_int, previous_term;

void on_signal(int signal) {
  if (asked_to_stop != 0) _exit(128 + signal);
  asked_to_stop = 1;
  constexpr std::string_view kText =
      "\nleeway: finishing this step, then saving; once more to stop at once\n";
  (void)!write(STDERR_FILENO, kText.data(), kText.size());
}

}  // namespace

Interrupt::Interrupt() {
  asked_to_stop = 0;
  struct sigaction action = {};
  action.sa_handler = on_signal;
  sigaction(SIGINT, &action, &previous_int);
  sigaction(SIGTERM, &action, &previous_term);
}

Interrupt::~Interrupt() {
  sigaction(SIGINT, &previous_int, nullptr);
  sigaction(SIGTERM, &previous_term, nullptr);
}

bool Interrupt::asked() const { return asked_to_stop != 0; }

}  // namespace leeway
