// A separate program, since it counts every allocation of the process.

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "core/test_support.h"
#include "leeway/evaluator.h"

namespace {
std::atomic<long> allocations{0};
}

// None is inlined: g++ 12 would warn that what one gave is freed by another.
[[gnu::noinline]] void* operator new(size_t size) {
  ++allocations;
  if (void* memory = std::malloc(size ? size : 1)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace leeway {
namespace {

TEST(Allocation, EvaluationAllocatesNothingAfterTheFirstCall) {
  const Batch batch = testing::random_batch(3, {5000, 700, 9000}, true);
  const FloatBatch floats(batch);
  const BatchView<float> view = floats.view();
  std::vector<float> grad(batch.pi.size());
  const Catalog catalog;
  Evaluator evaluator(2);
  for (const char* preset : {"icepop", "dppo_kl", "ppo", "cispo", "sapo", "kpop", "gspo",
                             "geo_mask", "grpo+tis", "ppo+icepop_tis", "off_policy_is"}) {
    const LossSpec spec = catalog.make_spec(preset, {});
    MetricSums sums;
    evaluator.evaluate(spec, view, grad, {}, &sums);
    const long before = allocations.load();
    for (int k = 0; k < 5; ++k) evaluator.evaluate(spec, view, grad, {}, &sums);
    EXPECT_EQ(allocations.load() - before, 0) << preset;
  }
}

}  // namespace
}  // namespace leeway
