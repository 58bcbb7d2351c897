#include "cli/sweep_signals.h"

#include <initializer_list>

namespace leeway {

SweepSignals::SweepSignals() {
  struct sigaction action = {};
  action.sa_handler = SIG_DFL;  // an inherited SIG_IGN would reap children unseen
  sigaction(SIGCHLD, &action, &previous_child_);
  sigemptyset(&set_);
  for (const int signal : {SIGINT, SIGTERM, SIGCHLD}) sigaddset(&set_, signal);
  struct sigaction hangup = {};
  sigaction(SIGHUP, nullptr, &hangup);
  if (hangup.sa_handler != SIG_IGN) sigaddset(&set_, SIGHUP);  // under nohup the sweep goes on
  sigprocmask(SIG_BLOCK, &set_, &previous_);
}

SweepSignals::~SweepSignals() {
  sigprocmask(SIG_SETMASK, &previous_, nullptr);
  sigaction(SIGCHLD, &previous_child_, nullptr);
}

bool SweepSignals::wait() const {
  const timespec most = {0, 500'000'000};
  const int received = sigtimedwait(&set_, nullptr, &most);
  if (received != SIGINT && received != SIGTERM && received != SIGHUP) return false;
  struct sigaction action = {};
  action.sa_handler = SIG_IGN;
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) sigaction(signal, &action, nullptr);
  return true;
}

void SweepSignals::restore() const { sigprocmask(SIG_SETMASK, &previous_, nullptr); }

}  // namespace leeway
