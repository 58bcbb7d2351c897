// A fixed set of threads that run the indices of one loop, or one function together, at a time.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "base/aligned.h"

namespace leeway {

// One member of a team of threads that run the same function side by side. All members make the
// same calls of `for_each` and `barrier` in the same order; between two of them a member may read
// what others wrote before.
class Team {
 public:
  // What the members share. `waiting` counts arrivals at the barrier of `round`.
  struct Shared {
    std::atomic<size_t> next{0};
    std::atomic<int> waiting{0};
    std::atomic<uint32_t> round{0};
    int spins = 0;  // looks at the barrier before a thread goes to sleep
    AlignedVector<std::byte> scratch;
  };

  Team(int rank, int size, Shared* shared) : rank_(rank), size_(size), shared_(shared) {}

  int rank() const { return rank_; }
  int size() const { return size_; }

  // Returns when every member has called it.
  void barrier();

  // Memory for all members, at least `bytes`, kept from call to call with whatever it held; valid
  // until the next call. Called by every member alike.
  std::byte* scratch(size_t bytes);

  // Hands out indices 0 .. count-1, each once, to whoever is free, and ends with a barrier. Which
  // member gets which index is not fixed: results must depend on the index alone.
  template <class Body>
  void for_each(int64_t count, Body&& body) {
    if (size_ == 1) {
      for (int64_t i = 0; i < count; ++i) body(i);
      return;
    }
    for (size_t i; (i = shared_->next.fetch_add(1, std::memory_order_relaxed)) <
                   static_cast<size_t>(count);) {
      body(static_cast<int64_t>(i));
    }
    barrier();
  }

 private:
  int rank_, size_;
  Shared* shared_;
};

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
  // Runs `body` once on every thread, all at the same time. The body must not throw: the others
  // would wait for a member that never comes, so that an exception ends the program.
  void run_team(const std::function<void(Team&)>& body);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace leeway
