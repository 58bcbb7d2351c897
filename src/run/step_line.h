// A training step as a line of text, with the time left.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <string>

#include "run/durations.h"

namespace leeway {

class StepLine {
 public:
  // `done` steps were made before; the rate counts from now on.
  void begin(int64_t done) {
    done_ = done;
    begin_ = std::chrono::steady_clock::now();
  }
  // "step  12/200  reward 0.5  43 s left"
  std::string text(int64_t step, int64_t total, const std::string& numbers) const {
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin_;
    const double left = elapsed.count() / static_cast<double>(std::max<int64_t>(1, step - done_)) *
                        static_cast<double>(total - step);
    return fmt::format("step {:>{}}/{}  {}  {}", step, fmt::formatted_size("{}", total), total,
                       numbers, time_left_text(left));
  }

 private:
  int64_t done_ = 0;
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

}  // namespace leeway
