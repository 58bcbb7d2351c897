#include "base/thread_pool.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "base/aligned.h"
#include "base/start_thread.h"
#include "leeway/error.h"

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

// How long an idle thread spins before it sleeps: longer than what a step does between two loops.
// Waking up takes tens of microseconds at best and milliseconds at worst, by which time a step of a
// small model is over.
constexpr auto kWatch = std::chrono::microseconds(500);
// How often the caller checks whether the others have finished before it yields its core.
constexpr int kSpins = 2000;

// A woken thread is often scheduled on the core of the thread that woke it, which keeps working;
// the system takes milliseconds to separate them. Moves the calling thread off core `cpu` if it is
// there and may run elsewhere.
void leave_core(int cpu) {
  if (cpu < 0 || cpu >= CPU_SETSIZE || ::sched_getcpu() != cpu) return;
  cpu_set_t allowed;
  if (::sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
  cpu_set_t others = allowed;
  CPU_CLR(cpu, &others);
  if (CPU_COUNT(&others) == 0) return;
  if (::sched_setaffinity(0, sizeof others, &others) == 0) {
    ::sched_setaffinity(0, sizeof allowed, &allowed);
  }
}

}  // namespace

// A loop is published by writing its slot and then `ticket`: the loop's number in the upper half,
// the next free index in the lower. An index is taken by incrementing the ticket if it still
// belongs to the loop, so that a late thread takes nothing. A slot is rewritten two loops later,
// when no thread can take an index of its old loop any more.
struct ThreadPool::State {
  struct Slot {
    std::atomic<Team::Function*> function{nullptr};
    std::atomic<void*> context{nullptr};
    std::atomic<int64_t> count{0};
    std::atomic<int64_t> done{0};
  };

  std::mutex one_caller;
  Slot slots[2];
  alignas(64) std::atomic<uint64_t> ticket{0};
  alignas(64) std::atomic<int> sleepers{0};
  std::atomic<int> caller_cpu{-1};  // where the caller of the last loop ran
  std::mutex mutex;                 // guards what follows
  std::condition_variable wake;
  bool stopping = false;
  std::exception_ptr failure;

  bool watching = false;  // there is a core per thread, so idle threads may spin
  AlignedVector<std::byte> scratch;
  std::vector<std::thread> workers;

  static uint32_t loop_of(uint64_t value) { return static_cast<uint32_t>(value >> 32); }
  static int64_t index_of(uint64_t value) { return static_cast<int64_t>(value & 0xffffffffu); }

  void call(Team::Function* function, void* context, int64_t index, int thread) {
    try {
      function(context, index, thread);
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (!failure) failure = std::current_exception();
    }
  }

  // Takes indices of the current loop until none are left.
  void work(int thread) {
    uint64_t seen = ticket.load(std::memory_order_acquire);
    for (;;) {
      Slot& slot = slots[loop_of(seen) & 1];
      auto* const function = slot.function.load(std::memory_order_relaxed);
      void* const context = slot.context.load(std::memory_order_relaxed);
      if (index_of(seen) >= slot.count.load(std::memory_order_relaxed)) return;
      if (!ticket.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel,
                                        std::memory_order_acquire)) {
        continue;
      }
      call(function, context, index_of(seen), thread);
      slot.done.fetch_add(1, std::memory_order_release);
      ++seen;
    }
  }

  void share(int64_t count, void* context, Team::Function* function) {
    LEEWAY_CHECK(count < int64_t{1} << 31, "a loop's index fits the ticket");
    if (workers.empty() || count <= 1) {
      for (int64_t i = 0; i < count; ++i) call(function, context, i, 0);
    } else {
      const uint32_t loop = loop_of(ticket.load(std::memory_order_relaxed)) + 1;
      Slot& slot = slots[loop & 1];
      slot.function.store(function, std::memory_order_relaxed);
      slot.context.store(context, std::memory_order_relaxed);
      slot.count.store(count, std::memory_order_relaxed);
      slot.done.store(0, std::memory_order_relaxed);
      caller_cpu.store(::sched_getcpu(), std::memory_order_relaxed);
      ticket.store(static_cast<uint64_t>(loop) << 32, std::memory_order_seq_cst);
      if (sleepers.load(std::memory_order_seq_cst) > 0) {
        {
          const std::lock_guard lock(mutex);
        }  // so that no thread is between checking for work and sleeping
        wake.notify_all();
      }
      work(0);
      for (int spins = 0; slot.done.load(std::memory_order_acquire) < count; ++spins) {
        if (spins < kSpins) {
          relax();
        } else {
          std::this_thread::yield();
        }
      }
    }
    const std::lock_guard lock(mutex);
    if (failure) std::rethrow_exception(std::exchange(failure, nullptr));
  }

  bool has_changed(uint32_t seen) const {
    return loop_of(ticket.load(std::memory_order_seq_cst)) != seen;
  }

  void watch(uint32_t seen) const {
    leave_core(caller_cpu.load(std::memory_order_relaxed));
    const auto end = std::chrono::steady_clock::now() + kWatch;
    while (std::chrono::steady_clock::now() < end) {
      for (int i = 0; i < 64; ++i) {
        if (has_changed(seen)) return;
        relax();
      }
    }
  }

  void stop() {
    {
      const std::lock_guard lock(mutex);
      stopping = true;
    }
    wake.notify_all();
    for (std::thread& worker : workers) worker.join();
  }

  void worker(int thread) {
    for (;;) {
      const uint32_t seen = loop_of(ticket.load(std::memory_order_acquire));
      work(thread);
      if (watching) watch(seen);
      if (has_changed(seen)) continue;
      std::unique_lock lock(mutex);
      sleepers.fetch_add(1, std::memory_order_seq_cst);
      wake.wait(lock, [&] { return stopping || has_changed(seen); });
      sleepers.fetch_sub(1, std::memory_order_seq_cst);
      if (stopping) return;
    }
  }
};

int Team::size() const { return pool_.threads(); }

void Team::share(int64_t count, void* context, Function* function) {
  pool_.state_->share(count, context, function);
}

std::byte* Team::scratch(size_t bytes) {
  AlignedVector<std::byte>& memory = pool_.state_->scratch;
  if (memory.size() < bytes) {
    memory = {};  // drop the old contents first: they need not be copied
    memory.resize(bytes);
  }
  return memory.data();
}

ThreadPool::ThreadPool(int threads) : state_(std::make_unique<State>()) {
  const int cores = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  if (threads <= 0) threads = cores;
  state_->watching = threads <= cores;
  try {
    for (int k = 1; k < threads; ++k) {
      state_->workers.push_back(start_thread([state = state_.get(), k] { state->worker(k); }));
    }
  } catch (...) {
    state_->stop();
    throw;
  }
}

ThreadPool::~ThreadPool() { state_->stop(); }

int ThreadPool::threads() const { return static_cast<int>(state_->workers.size()) + 1; }

void ThreadPool::run(size_t count, const std::function<void(size_t)>& body) {
  const std::lock_guard only(state_->one_caller);
  const auto call = [&](int64_t index) { body(static_cast<size_t>(index)); };
  Team(*this).for_each(static_cast<int64_t>(count), call);
}

void ThreadPool::run_team(const std::function<void(Team&)>& body) {
  const std::lock_guard only(state_->one_caller);
  Team team(*this);
  body(team);
}

}  // namespace leeway
