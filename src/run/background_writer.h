// Files that are written beside training: one job at a time, on a thread of its own.
#pragma once

#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace leeway {

// Used by one thread. The destructor waits for the job in progress.
class BackgroundWriter {
 public:
  BackgroundWriter() = default;
  ~BackgroundWriter() { wait(); }
  BackgroundWriter(const BackgroundWriter&) = delete;
  BackgroundWriter& operator=(const BackgroundWriter&) = delete;

  // Begins a job when the one before has ended, waiting for it. What `write` uses must not change
  // until it has ended. An exception of it becomes a failure: "no WHAT: the reason".
  void start(const std::string& what, std::function<void()> write);
  void wait();
  // Those of jobs that have ended since the last call.
  std::vector<std::string> take_failures();

 private:
  std::thread thread_;
  std::mutex mutex_;
  std::vector<std::string> failures_;
};

}  // namespace leeway
