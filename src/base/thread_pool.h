// A fixed set of threads that run the indices of one loop at a time.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

namespace leeway {

// `run` hands out indices 0 .. count-1, each exactly once, to the pool's threads and the caller,
// and returns when all are done. Which thread gets which index is not fixed, so results must depend
// on the index alone. An exception of the body is rethrown by `run` after the loop has ended. One
// loop at a time: concurrent calls of `run` wait for each other.
class ThreadPool {
 public:
  // `threads` counts the caller; 1 runs everything in place, 0 means one per core.
  explicit ThreadPool(int threads = 0);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const;
  // Does not allocate.
  void run(size_t count, const std::function<void(size_t)>& body);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace leeway
