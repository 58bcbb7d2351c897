// Low-rank updates on a GPU, against sums in double, and a row by itself against many.
#include "cuda/low_rank.h"

#include <cuda_bf16.h>

#include <cmath>
#include <cstring>

#include "base/rng.h"
#include "cuda/gpu_test_support.h"

namespace leeway::cuda {
namespace {

using Numbers = std::vector<__nv_bfloat16>;

Numbers random_numbers(int64_t count, Rng& rng) {
  Numbers numbers(static_cast<size_t>(count));
  for (auto& number : numbers) {
    number = __float2bfloat16(static_cast<float>(2.0 * rng.uniform() - 1.0));
  }
  return numbers;
}

double at(const Numbers& numbers, int64_t place) {
  return __bfloat162float(numbers[static_cast<size_t>(place)]);
}

struct Columns {
  int64_t first, outputs;
};
struct Case {
  int64_t rank, width;  // of y
  std::vector<Columns> parts;
};
// One matrix, three, two with a gap between them, and outputs that no tile divides.
const std::vector<Case> kCases = {{8, 64, {{0, 64}}},
                                  {16, 960, {{0, 576}, {576, 192}, {768, 192}}},
                                  {24, 640, {{0, 128}, {512, 128}}},
                                  {40, 1000, {{8, 888}}},
                                  {64, 3072, {{0, 1536}, {1536, 1536}}}};

struct Problem {
  explicit Problem(const Case& c, int64_t rows) : of(c) {
    Rng rng(7);
    low = random_numbers(rows * static_cast<int64_t>(c.parts.size()) * c.rank, rng);
    y = random_numbers(rows * c.width, rng);
    for (const Columns& columns : c.parts)
      b.push_back(random_numbers(columns.outputs * c.rank, rng));
  }
  // Of the rows from `first` on.
  Numbers computed(int64_t first, int64_t rows) const {
    const auto parts = static_cast<int64_t>(of.parts.size());
    const auto some = [&](const Numbers& all, int64_t width) {
      return DeviceArray<__nv_bfloat16>(std::span<const __nv_bfloat16>(
          all.data() + first * width, static_cast<size_t>(rows * width)));
    };
    const auto low_there = some(low, parts * of.rank), y_there = some(y, of.width);
    std::vector<std::unique_ptr<DeviceArray<__nv_bfloat16>>> b_there;
    LowRankUpdate update;
    update.rows = rows, update.rank = of.rank, update.scale = kScale;
    update.low = low_there.data(), update.y = y_there.data(), update.y_stride = of.width;
    for (const Columns& columns : of.parts) {
      b_there.push_back(std::make_unique<DeviceArray<__nv_bfloat16>>(b[b_there.size()]));
      update.part[update.parts++] = {columns.first, columns.outputs, b_there.back()->data()};
    }
    add_low_rank(update, nullptr);
    return y_there.values();
  }

  static constexpr float kScale = 1.5f;
  const Case& of;
  Numbers low, y;
  std::vector<Numbers> b;
};

TEST(LowRank, AddsTheProductToTheColumnsOfItsParts) {
  LEEWAY_NEEDS_GPU();
  constexpr int64_t kRows = 37;
  for (const Case& c : kCases) {
    const Problem problem(c, kRows);
    const Numbers got = problem.computed(0, kRows);
    const auto parts = static_cast<int64_t>(c.parts.size());
    std::vector<double> expected(got.size());
    for (size_t i = 0; i < expected.size(); ++i) {
      expected[i] = __bfloat162float(problem.y[i]);
    }
    for (int64_t p = 0; p < parts; ++p) {
      const auto [first, outputs] = c.parts[static_cast<size_t>(p)];
      for (int64_t row = 0; row < kRows; ++row) {
        for (int64_t o = 0; o < outputs; ++o) {
          double sum = 0.0;
          for (int64_t k = 0; k < c.rank; ++k) {
            sum += at(problem.low, (row * parts + p) * c.rank + k) *
                   at(problem.b[static_cast<size_t>(p)], o * c.rank + k);
          }
          expected[static_cast<size_t>(row * c.width + first + o)] += Problem::kScale * sum;
        }
      }
    }
    for (size_t i = 0; i < got.size(); ++i) {
      // One rounding to bf16, of a float32 sum of at most 64 numbers below one.
      const double value = __bfloat162float(got[i]);
      ASSERT_NEAR(value, expected[i], 0.004 * std::abs(expected[i]) + 1e-4)
          << "rank " << c.rank << ", number " << i;
    }
  }
}

TEST(LowRank, ARowHasTheSameBitsWithAnyNumberOfRows) {
  LEEWAY_NEEDS_GPU();
  constexpr int64_t kRows = 300;
  for (const Case& c : kCases) {
    const Problem problem(c, kRows);
    const Numbers all = problem.computed(0, kRows);
    for (const auto& [first, rows] : {std::pair{0, 1}, {5, 1}, {13, 2}, {9, 17}, {100, 64}}) {
      const Numbers some = problem.computed(first, rows);
      EXPECT_EQ(std::memcmp(some.data(), all.data() + first * c.width, some.size() * 2), 0)
          << "rank " << c.rank << ", " << rows << " rows from " << first;
    }
  }
}

}  // namespace
}  // namespace leeway::cuda
