#include "run/failure_lines.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/printable.h"

namespace leeway {
namespace {

constexpr double kInterval = 1.0;        // seconds between two lines
constexpr size_t kLongestMessage = 400;  // bytes

}  // namespace

std::string failure_line(const std::string& environment, const RolloutFailure& failure) {
  const size_t begin =
      std::min(failure.message.find_first_not_of(" \t\r\n"), failure.message.size());
  const size_t end = std::min(failure.message.find_first_of("\r\n", begin), failure.message.size());
  std::string first = failure.message.substr(begin, end - begin);
  if (first.size() > kLongestMessage) {
    // Not in the middle of a character, whose bytes would be escaped one by one.
    size_t cut = kLongestMessage;
    while (cut > kLongestMessage - 4 && (static_cast<unsigned char>(first[cut]) & 0xc0) == 0x80) {
      --cut;
    }
    first.resize(cut);
    first += " ..";
  }
  return fmt::format("rollout failed: {}, example {}: {}: {}", environment, failure.example,
                     name_of(failure.kind), printable(first));
}

std::optional<std::string> FailureLines::add(const std::string& environment,
                                             const RolloutFailure& failure, double now) {
  const bool first = told_.insert(environment).second;
  if (!first && last_ && now - *last_ < kInterval) {
    ++untold_;
    return std::nullopt;
  }
  last_ = now;
  std::string line = failure_line(environment, failure);
  if (const int64_t more = std::exchange(untold_, 0); more > 0) {
    line += fmt::format(" (and {} more before it)", more);
  }
  return line;
}

std::optional<std::string> FailureLines::rest() {
  const int64_t more = std::exchange(untold_, 0);
  if (more == 0) return std::nullopt;
  return fmt::format("rollouts failed: and {} more", more);
}

}  // namespace leeway
