// Writes files in the background during training: one job at a time, on its own thread.
#pragma once

#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace leeway {

// Not thread-safe. The destructor waits for the current job.
class BackgroundWriter {
 public:
  BackgroundWriter() = default;
  ~BackgroundWriter() { wait(); }
  BackgroundWriter(const BackgroundWriter&) = delete;
  BackgroundWriter& operator=(const BackgroundWriter&) = delete;

  // Starts a job, after waiting for the previous one. What `write` uses must not change until it
  // has ended. An exception becomes a failure: "no WHAT: the reason".
  void start(const std::string& what, std::function<void()> write);
  void wait();
  // Failures of jobs that have ended since the last call.
  std::vector<std::string> take_failures();

 private:
  std::thread thread_;
  std::mutex mutex_;
  std::vector<std::string> failures_;
};

}  // namespace leeway
