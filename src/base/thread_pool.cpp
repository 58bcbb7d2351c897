#include "base/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace leeway {

// A loop is published under `mutex` by raising `generation`. Workers join it while it has indices
// left; the caller waits until no worker is inside it any more, so that `body` may go away.
struct ThreadPool::State {
  std::mutex one_loop;
  std::mutex mutex;
  std::condition_variable wake, done;
  uint64_t generation = 0;
  bool stopping = false;
  const std::function<void(size_t)>* body = nullptr;
  size_t count = 0;
  std::atomic<size_t> next{0};
  int inside = 0;
  std::exception_ptr failure;
  std::vector<std::thread> workers;

  // Takes the loop by value: the published one may be withdrawn while a worker is still inside.
  void work(const std::function<void(size_t)>& loop, size_t size) {
    for (size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < size;) {
      try {
        loop(i);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!failure) failure = std::current_exception();
      }
    }
  }

  void worker() {
    uint64_t seen = 0;
    std::unique_lock lock(mutex);
    for (;;) {
      wake.wait(lock, [&] { return stopping || generation != seen; });
      if (stopping) return;
      seen = generation;
      if (body == nullptr) continue;
      ++inside;
      const auto* loop = body;
      const size_t size = count;
      lock.unlock();
      work(*loop, size);
      lock.lock();
      if (--inside == 0) done.notify_one();
    }
  }
};

ThreadPool::ThreadPool(int threads) : state_(std::make_unique<State>()) {
  if (threads <= 0) threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  for (int k = 1; k < threads; ++k) state_->workers.emplace_back([this] { state_->worker(); });
}

ThreadPool::~ThreadPool() {
  {
    const std::lock_guard lock(state_->mutex);
    state_->stopping = true;
  }
  state_->wake.notify_all();
  for (std::thread& worker : state_->workers) worker.join();
}

int ThreadPool::threads() const { return static_cast<int>(state_->workers.size()) + 1; }

void ThreadPool::run(size_t count, const std::function<void(size_t)>& body) {
  const std::lock_guard only(state_->one_loop);
  {
    const std::lock_guard lock(state_->mutex);
    state_->body = &body;
    state_->count = count;
    state_->next.store(0, std::memory_order_relaxed);
    state_->failure = nullptr;
    ++state_->generation;
  }
  if (count > 1) state_->wake.notify_all();
  state_->work(body, count);
  std::unique_lock lock(state_->mutex);
  state_->body = nullptr;  // a worker that wakes late finds nothing to join
  state_->done.wait(lock, [&] { return state_->inside == 0; });
  if (state_->failure) std::rethrow_exception(std::exchange(state_->failure, nullptr));
}

}  // namespace leeway
