// A fixed set of threads that share the indices of loops.
//
// The thread that runs a loop works on it too, and waits for indices that others have taken, never
// for threads that have taken none: on a busy machine, where a thread gets its core late or not at
// all, the caller does the work itself.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <type_traits>

namespace leeway {

class ThreadPool;

// What a function run by `ThreadPool::run_team` uses to share its loops. Valid during that call
// only.
class Team {
 public:
  // The number of threads that may take part, the caller included.
  int size() const;

  // Hands out indices 0 .. count-1, each once, to whichever thread is free, and returns when all
  // are done. Which thread gets which index is not fixed, so results must depend on the index
  // alone. The body is body(index), or body(index, thread) with a number below `size` that no two
  // threads share at a time. Bodies must not start loops. If a body throws, the exception is
  // rethrown when all have ended.
  template <class Body>
  void for_each(int64_t count, Body&& body) {
    using Plain = std::remove_reference_t<Body>;
    share(count, const_cast<void*>(static_cast<const void*>(&body)),
          [](void* context, int64_t index, int thread) {
            Plain& call = *static_cast<Plain*>(context);
            if constexpr (std::is_invocable_v<Plain&, int64_t, int>) {
              call(index, thread);
            } else {
              call(index);
            }
          });
  }

  // At least `bytes` of memory owned by the pool. It keeps its contents between calls and is valid
  // until the next call.
  std::byte* scratch(size_t bytes);

 private:
  friend class ThreadPool;
  using Function = void(void* context, int64_t index, int thread);
  explicit Team(ThreadPool& pool) : pool_(pool) {}
  void share(int64_t count, void* context, Function* function);
  ThreadPool& pool_;
};

class ThreadPool {
 public:
  // `threads` counts the caller; 1 runs everything on the caller, 0 means one per core. May throw
  // Error.
  explicit ThreadPool(int threads = 0);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const;
  // One loop, as Team::for_each. Does not allocate. Concurrent calls take turns.
  void run(size_t count, const std::function<void(size_t)>& body);
  // Runs `body` on the calling thread, with the whole pool for its loops. Concurrent calls take
  // turns.
  void run_team(const std::function<void(Team&)>& body);

 private:
  friend class Team;
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace leeway
