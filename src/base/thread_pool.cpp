#include "base/thread_pool.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace leeway {
namespace {

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// How long a thread with nothing to do watches for work before it sleeps: waking it costs tens of
// microseconds, as much as a whole step of a small model.
constexpr auto kWatch = std::chrono::microseconds(60);
constexpr int kSpins = 2000;

}  // namespace

// The last to arrive takes the index back to 0 for the next loop and opens the barrier. Waiting
// threads spin for a while, since the others are about to arrive, and then sleep: where a core is
// wanted by somebody else, spinning would keep the missing member from coming.
void Team::barrier() {
  if (size_ == 1) return;
  const uint32_t round = shared_->round.load(std::memory_order_relaxed);
  if (shared_->waiting.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
    shared_->next.store(0, std::memory_order_relaxed);
    shared_->waiting.store(0, std::memory_order_relaxed);
    shared_->round.store(round + 1, std::memory_order_release);
    shared_->round.notify_all();
    return;
  }
  for (int spins = 0; spins < shared_->spins; ++spins) {
    if (shared_->round.load(std::memory_order_acquire) != round) return;
    relax();
  }
  shared_->round.wait(round, std::memory_order_acquire);
}

std::byte* Team::scratch(size_t bytes) {
  if (rank_ == 0 && shared_->scratch.size() < bytes) {
    shared_->scratch = {};
    shared_->scratch.resize(bytes);
  }
  barrier();
  return shared_->scratch.data();
}

// A loop is published under `mutex` by raising `generation`. Workers join it while it has indices
// left; the caller waits until no worker is inside it any more, so that `body` may go away.
struct ThreadPool::State {
  std::mutex one_loop;
  std::mutex mutex;
  std::condition_variable wake, done;
  std::atomic<uint64_t> generation{0};  // written under `mutex`, watched without
  bool stopping = false;
  bool watching = false;  // threads may spin for work: there is a core for each
  bool one_each = false;  // a team: every thread takes exactly one index
  const std::function<void(size_t)>* body = nullptr;
  size_t count = 0;
  std::atomic<size_t> next{0};
  int inside = 0;
  std::exception_ptr failure;
  Team::Shared team;
  std::vector<std::thread> workers;

  // Takes the loop by value: the published one may be withdrawn while a worker is still inside.
  void work(const std::function<void(size_t)>& loop, size_t size, bool once) {
    for (size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < size;) {
      try {
        loop(i);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!failure) failure = std::current_exception();
      }
      if (once) return;
    }
  }

  void watch(uint64_t seen) const {
    const auto end = std::chrono::steady_clock::now() + kWatch;
    while (std::chrono::steady_clock::now() < end) {
      for (int i = 0; i < 64; ++i) {
        if (generation.load(std::memory_order_acquire) != seen) return;
        relax();
      }
    }
  }

  void loop(size_t size, const std::function<void(size_t)>& function, bool once) {
    {
      const std::lock_guard lock(mutex);
      body = &function;
      count = size;
      one_each = once;
      next.store(0, std::memory_order_relaxed);
      failure = nullptr;
      ++generation;
    }
    if (size > 1) wake.notify_all();
    work(function, size, once);
    std::unique_lock lock(mutex);
    // A team has begun only when every index is taken.
    done.wait(lock, [&] { return inside == 0 && (!once || next.load() >= size); });
    body = nullptr;  // a worker that wakes late finds nothing to join
    if (failure) std::rethrow_exception(std::exchange(failure, nullptr));
  }

  void worker() {
    uint64_t seen = 0;
    std::unique_lock lock(mutex);
    for (;;) {
      if (watching && !stopping && generation == seen) {
        lock.unlock();
        watch(seen);
        lock.lock();
      }
      wake.wait(lock, [&] { return stopping || generation != seen; });
      if (stopping) return;
      seen = generation;
      if (body == nullptr) continue;
      ++inside;
      const auto* loop = body;
      const size_t size = count;
      const bool once = one_each;
      lock.unlock();
      work(*loop, size, once);
      lock.lock();
      if (--inside == 0) done.notify_one();
    }
  }
};

ThreadPool::ThreadPool(int threads) : state_(std::make_unique<State>()) {
  if (threads <= 0) threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  state_->watching = threads <= static_cast<int>(std::thread::hardware_concurrency());
  state_->team.spins = state_->watching ? kSpins : 0;
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
  state_->loop(count, body, false);
}

void ThreadPool::run_team(const std::function<void(Team&)>& body) {
  const int size = threads();
  const std::lock_guard only(state_->one_loop);
  const auto member = [&](size_t rank) noexcept {
    Team team(static_cast<int>(rank), size, &state_->team);
    body(team);
  };
  state_->loop(static_cast<size_t>(size), std::cref(member), true);
}

}  // namespace leeway
