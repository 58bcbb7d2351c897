#include "run/background_writer.h"

#include <fmt/format.h>

#include <exception>
#include <utility>

namespace leeway {

void BackgroundWriter::start(const std::string& what, std::function<void()> write) {
  wait();
  thread_ = std::thread([this, what, write = std::move(write)] {
    try {
      write();
    } catch (const std::exception& error) {
      const std::lock_guard lock(mutex_);
      failures_.push_back(fmt::format("no {}: {}", what, error.what()));
    }
  });
}

void BackgroundWriter::wait() {
  if (thread_.joinable()) thread_.join();
}

std::vector<std::string> BackgroundWriter::take_failures() {
  const std::lock_guard lock(mutex_);
  return std::exchange(failures_, {});
}

}  // namespace leeway
