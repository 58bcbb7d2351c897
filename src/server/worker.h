// A thread that runs functions one after the other.
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "base/start_thread.h"

namespace leeway {

class Worker {
 public:
  Worker() : thread_(start_thread([this] { run(); })) {}
  // Finishes the function that runs; those that wait are dropped.
  ~Worker() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_one();
    thread_.join();
  }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // From any thread. The function must not throw.
  void post(std::function<void()> function) {
    {
      const std::lock_guard lock(mutex_);
      waiting_.push_back(std::move(function));
    }
    changed_.notify_one();
  }

 private:
  void run() {
    while (true) {
      std::function<void()> next;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return stopping_ || !waiting_.empty(); });
        if (stopping_) return;
        next = std::move(waiting_.front());
        waiting_.erase(waiting_.begin());
      }
      next();
    }
  }

  std::mutex mutex_;  // of the three that follow
  std::condition_variable changed_;
  std::vector<std::function<void()>> waiting_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace leeway
