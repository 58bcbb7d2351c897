// A fixed set of threads that share the indices of loops.
//
// Whoever runs a loop works on it too, and waits for indices that others have taken, never for
// threads that have taken none: on a busy machine, where a core comes late or not at all, the
// caller does the work itself.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <type_traits>

namespace leeway {

class ThreadPool;

// What a function run by `ThreadPool::run_team` uses to share its loops. Belongs to that call.
class Team {
 public:
  // How many threads may take part, the caller included.
  int size() const;

  // Hands out indices 0 .. count-1, each once, to whoever is free, and returns when all are done.
  // Which thread gets which index is not fixed: results must depend on the index alone. The body
  // is body(index), or body(index, thread) with a number below `size` that no two threads share at
  // a time. Bodies do not start loops. An exception of a body is thrown again when all have ended.
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

  // Memory of the pool, at least `bytes`, kept from call to call with whatever it held; valid until
  // the next call.
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
  // `threads` counts the caller; 1 runs everything in place, 0 means one per core. May throw Error.
  explicit ThreadPool(int threads = 0);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const;
  // One loop, as Team::for_each. Does not allocate. Calls from several threads take turns.
  void run(size_t count, const std::function<void(size_t)>& body);
  // Runs `body` on the calling thread, with all of the pool for its loops. Calls take turns.
  void run_team(const std::function<void(Team&)>& body);

 private:
  friend class Team;
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace leeway
