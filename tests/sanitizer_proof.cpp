// Mistakes that a sanitizer build has to find, for scripts/run_sanitized: without an argument it
// prints their names, one a line, and with a name it makes that mistake. Built by sanitizer builds
// alone.
#include <atomic>
#include <cstdio>
#include <limits>
#include <memory>
#include <string_view>
#include <thread>

namespace {

#ifdef __SANITIZE_THREAD__
constexpr const char* kMistakes[] = {"data_race"};
#else
constexpr const char* kMistakes[] = {"heap_overflow", "signed_overflow"};
#endif

// The compiler does not know its value.
int hidden(int value) {
  volatile int kept = value;
  return kept;
}

int heap_overflow() {
  const auto numbers = std::make_unique<int[]>(static_cast<size_t>(hidden(4)));
  return numbers[static_cast<size_t>(hidden(4))];
}

int signed_overflow() { return hidden(std::numeric_limits<int>::max()) + hidden(1); }

// The order of the two writes is always the same, but nothing that threads synchronise by makes it.
int data_race() {
  int number = 0;
  std::atomic<bool> written = false;
  std::thread first([&] {
    number = 1;
    written.store(true, std::memory_order_relaxed);
  });
  while (!written.load(std::memory_order_relaxed)) std::this_thread::yield();
  number = 2;
  first.join();
  return hidden(number);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    for (const char* name : kMistakes) std::puts(name);
    return 0;
  }
  const std::string_view mistake = argv[1];
  int result = -1;
  if (mistake == "heap_overflow") result = heap_overflow();
  if (mistake == "signed_overflow") result = signed_overflow();
  if (mistake == "data_race") result = data_race();
  std::printf("not found: %s, %d\n", argv[1], result);
  return 0;
}
