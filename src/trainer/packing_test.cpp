#include "trainer/packing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "base/rng.h"

namespace leeway {
namespace {

// Bin sizes of first-fit decreasing, the plain way.
std::vector<int64_t> first_fit_decreasing(std::vector<int64_t> sizes, int64_t budget) {
  std::sort(sizes.begin(), sizes.end(), std::greater<>());
  std::vector<int64_t> bins;
  for (int64_t size : sizes) {
    if (size == 0) continue;
    auto bin = std::find_if(bins.begin(), bins.end(),
                            [&](int64_t filled) { return filled + size <= budget; });
    if (bin == bins.end()) bin = bins.insert(bins.end(), 0);
    *bin += size;
  }
  return bins;
}

struct Problem {
  std::vector<int64_t> sizes;
  int64_t budget;
};

Problem random_problem(uint64_t seed) {
  Rng rng(seed);
  Problem problem;
  problem.budget = 1 + static_cast<int64_t>(rng.below(200));
  const uint64_t largest = 1 + rng.below(seed % 3 == 0 ? 20 : 300);
  problem.sizes.resize(rng.below(60));
  for (int64_t& size : problem.sizes) size = static_cast<int64_t>(rng.below(largest + 1));
  return problem;
}

int64_t size_of(const Problem& problem, const std::vector<size_t>& bin) {
  return std::accumulate(bin.begin(), bin.end(), int64_t{0},
                         [&](int64_t sum, size_t item) { return sum + problem.sizes[item]; });
}

constexpr uint64_t kProblems = 400;

TEST(Packing, HoldsEveryItemOnceAndLeavesEmptyOnesOut) {
  for (uint64_t seed = 0; seed < kProblems; ++seed) {
    const Problem problem = random_problem(seed);
    std::vector<int> seen(problem.sizes.size(), 0);
    for (const auto& bin : pack(problem.sizes, problem.budget)) {
      ASSERT_FALSE(bin.empty());
      for (size_t item : bin) ++seen[item];
    }
    for (size_t i = 0; i < seen.size(); ++i) {
      ASSERT_EQ(seen[i], problem.sizes[i] > 0 ? 1 : 0) << "seed " << seed << " item " << i;
    }
  }
}

TEST(Packing, KeepsTheBudgetAndGivesLargerItemsABinOfTheirOwn) {
  for (uint64_t seed = 0; seed < kProblems; ++seed) {
    const Problem problem = random_problem(seed);
    for (const auto& bin : pack(problem.sizes, problem.budget)) {
      if (bin.size() > 1) {
        ASSERT_LE(size_of(problem, bin), problem.budget) << "seed " << seed;
      }
    }
  }
}

TEST(Packing, HasAsManyBinsAsFirstFitDecreasingAndNoneLarger) {
  for (uint64_t seed = 0; seed < kProblems; ++seed) {
    const Problem problem = random_problem(seed);
    const std::vector<int64_t> plain = first_fit_decreasing(problem.sizes, problem.budget);
    const auto bins = pack(problem.sizes, problem.budget);
    ASSERT_EQ(bins.size(), plain.size()) << "seed " << seed;
    int64_t largest = 0;
    for (const auto& bin : bins) largest = std::max(largest, size_of(problem, bin));
    if (!plain.empty()) {
      ASSERT_LE(largest, *std::max_element(plain.begin(), plain.end())) << "seed " << seed;
    }
  }
}

TEST(Packing, IsOrderedAndTheSameEachTime) {
  for (uint64_t seed = 0; seed < kProblems; ++seed) {
    const Problem problem = random_problem(seed);
    const auto bins = pack(problem.sizes, problem.budget);
    ASSERT_EQ(bins, pack(problem.sizes, problem.budget));
    for (size_t b = 0; b < bins.size(); ++b) {
      ASSERT_TRUE(std::is_sorted(bins[b].begin(), bins[b].end()));
      if (b > 0) {
        ASSERT_LT(bins[b - 1].front(), bins[b].front());
      }
    }
  }
}

TEST(Packing, SpreadsWhatFirstFitCrowds) {
  // First-fit decreasing fills 10 and leaves 2; six each is as few bins.
  const std::vector<int64_t> sizes{2, 2, 2, 2, 2, 2};
  const auto bins = pack(sizes, 10);
  ASSERT_EQ(bins.size(), 2u);
  EXPECT_EQ(bins[0].size(), 3u);
}

TEST(Packing, OfNothingIsNothing) {
  EXPECT_TRUE(pack({}, 10).empty());
  EXPECT_TRUE(pack(std::vector<int64_t>{0, 0}, 10).empty());
}

}  // namespace
}  // namespace leeway
