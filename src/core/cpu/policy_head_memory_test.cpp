// A program of its own: it counts what every allocation of the process takes, and the most there
// was at one time.

#include <gtest/gtest.h>
#include <malloc.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "core/cpu/policy_head_test_support.h"

namespace {

std::atomic<int64_t> held{0}, most{0};

void* counted(void* memory) {
  if (memory == nullptr) throw std::bad_alloc();
  const int64_t now = held += static_cast<int64_t>(malloc_usable_size(memory));
  int64_t before = most;
  while (now > before && !most.compare_exchange_weak(before, now)) {
  }
  return memory;
}

void give_back(void* memory) {
  if (memory != nullptr) held -= static_cast<int64_t>(malloc_usable_size(memory));
  std::free(memory);
}

}  // namespace

void* operator new(size_t size) { return counted(std::malloc(size ? size : 1)); }
void* operator new(size_t size, std::align_val_t alignment) {
  const size_t to = static_cast<size_t>(alignment);
  return counted(std::aligned_alloc(to, (size + to - 1) / to * to));
}
void operator delete(void* memory) noexcept { give_back(memory); }
void operator delete(void* memory, size_t) noexcept { give_back(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { give_back(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { give_back(memory); }

namespace leeway {
namespace {

using testing::Head;

// Bytes `body` takes at its worst beyond what there was.
template <class Body>
int64_t peak_of(Body&& body) {
  const int64_t before = held;
  most = before;
  body();
  return most - before;
}

struct Calls {
  const Head& head;
  const FloatBatch floats;
  std::vector<float> logprobs, entropy, d_hidden, d_weight, g;

  Calls(const Head& the_head, const Batch& batch)
      : head(the_head),
        floats(batch),
        logprobs(static_cast<size_t>(head.tokens)),
        entropy(logprobs),
        d_hidden(head.hidden.size()),
        d_weight(head.weight.size()),
        g(static_cast<size_t>(head.tokens), 1.0f) {}

  int64_t forward(ThreadPool& pool) {
    return peak_of([&] { head_logprobs(pool, head.problem(), logprobs, entropy); });
  }
  int64_t backward(ThreadPool& pool) {
    return peak_of([&] { head_backward(pool, head.problem(), g, g, d_hidden, d_weight); });
  }
  int64_t everything(ThreadPool& pool, const LossSpec& spec) {
    return peak_of([&] {
      policy_head(pool, head.problem(), spec, floats.view(), {}, logprobs, entropy, d_hidden,
                  d_weight);
    });
  }
};

TEST(PolicyHeadMemory, StaysWithinTheChunksAtALargeVocabulary) {
  Head head(1, 48, 4, 151936);
  head.chunk_bytes = int64_t{16} << 20;
  const Batch batch = testing::batch_for(head, 1, {20, 28}, true);
  Calls calls(head, batch);
  const int64_t per_token = 96 * head.tokens;
  for (const int threads : {1, 2}) {
    EXPECT_LE(head_workspace_bytes(head.problem()), head.chunk_bytes + per_token);
    // Nothing like all logits at once, and not much less than what may be used.
    EXPECT_GT(head_workspace_bytes(head.problem()), head.chunk_bytes * 9 / 10);
    ThreadPool pool(threads);  // its packing memory is counted with the first call
    for (const int64_t bytes : {calls.forward(pool), calls.backward(pool),
                                calls.everything(pool, Catalog().make_spec("icepop", {})),
                                calls.everything(pool, Catalog().make_spec("gspo", {}))}) {
      EXPECT_LE(bytes, head.chunk_bytes + per_token);
    }
  }
}

// Sequences of any length, including a single token, which costs the most besides the logits.
TEST(PolicyHeadMemory, GrowsWithTheTokensAsItSaysForEveryPreset) {
  const Catalog catalog;
  for (const bool short_ones : {false, true}) {
    auto head_of = [](int64_t tokens) {
      Head head(1, tokens, 6, 37);
      head.rows_in_a_chunk(500);
      return head;
    };
    auto lengths = [&](int tokens) {
      return short_ones ? std::vector<int>(static_cast<size_t>(tokens), 1)
                        : std::vector<int>{tokens - 700, 700};
    };
    const Head few = head_of(4000), many = head_of(8000);
    Calls few_calls(few, testing::batch_for(few, 1, lengths(4000)));
    Calls many_calls(many, testing::batch_for(many, 1, lengths(8000)));
    const int64_t least = head_workspace_bytes(few.problem());
    const int64_t growth = head_workspace_bytes(many.problem()) - least;
    auto expect_within = [&](auto call, const std::string& what) {
      ThreadPool one(1), other(1);
      const int64_t before = call(few_calls, one);
      EXPECT_LE(before, least) << what;
      EXPECT_LE(call(many_calls, other) - before, growth) << what;
    };
    expect_within([](Calls& c, ThreadPool& pool) { return c.forward(pool); }, "forward");
    expect_within([](Calls& c, ThreadPool& pool) { return c.backward(pool); }, "backward");
    for (const auto& preset : testing::native_list(catalog)) {
      const LossSpec spec = catalog.make_spec(preset.preset, preset.settings);
      expect_within([&](Calls& c, ThreadPool& pool) { return c.everything(pool, spec); },
                    preset.label());
    }
  }
}

TEST(PolicyHeadMemory, OfAChunkOfOneRowIsUsedWhateverTheRoomAndPackingIsCounted) {
  Head head(1, 6, 300, 5000);  // wide and deep enough for the largest packing
  head.chunk_bytes = 0;
  Calls calls(head, testing::batch_for(head, 1, {6}));
  const int64_t bound = head_workspace_bytes(head.problem());
  EXPECT_LT(bound, int64_t{3} << 20);
  ThreadPool pool(1), other(1);
  for (const int64_t bytes :
       {calls.forward(pool), calls.everything(other, Catalog().make_spec("gspo", {}))}) {
    EXPECT_LE(bytes, bound);
    EXPECT_GT(bytes, int64_t{2} << 20);
  }
}

}  // namespace
}  // namespace leeway
