// The clock of a real run.
#pragma once

#include <chrono>
#include <thread>

#include "orchestrator/interfaces.h"

namespace leeway {

class SteadyClock : public Clock {
 public:
  double now() const override {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }
  void sleep(double seconds) override {
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  }
};

}  // namespace leeway
