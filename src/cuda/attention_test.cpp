// Attention on a GPU: the three ways to compute a row against a reference in double, and against
// each other bit for bit.
#include "cuda/attention.h"

#include <cuda_bf16.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "base/rng.h"
#include "cuda/gpu_test_support.h"

namespace leeway::cuda {
namespace {

using Numbers = std::vector<__nv_bfloat16>;

Numbers random_numbers(size_t count, Rng& rng) {
  Numbers numbers(count);
  for (auto& number : numbers) number = __float2bfloat16(static_cast<float>(rng.normal()));
  return numbers;
}

std::vector<uint16_t> bits_of(const Numbers& numbers) {
  std::vector<uint16_t> bits(numbers.size());
  std::memcpy(bits.data(), numbers.data(), numbers.size() * sizeof(uint16_t));
  return bits;
}

// Sequences of given lengths, packed, and the same keys and values in pages in a random order. A
// page's places beyond a sequence's end hold NaN.
struct Problem {
  HeadSizes sizes;
  std::vector<int> lengths;
  std::vector<int32_t> positions, starts, pages;
  std::vector<int64_t> first_rows;
  Numbers q, keys, values, paged_keys, paged_values;

  Problem(const HeadSizes& of, std::vector<int> of_lengths, uint64_t seed = 1)
      : sizes(of), lengths(std::move(of_lengths)) {
    Rng rng(seed);
    int64_t rows = 0, blocks = 0;
    for (const int length : lengths) {
      first_rows.push_back(rows);
      const auto start = static_cast<int32_t>(pages.size());
      for (int p = 0; p < length; ++p) positions.push_back(p), starts.push_back(start);
      for (int64_t b = 0; b < (length + kBlockKeys - 1) / kBlockKeys; ++b) {
        pages.push_back(static_cast<int32_t>(blocks++));
      }
      rows += length;
    }
    for (size_t i = pages.size(); i > 1; --i) std::swap(pages[i - 1], pages[rng.below(i)]);
    const auto of_rows = [&](int64_t heads) {
      return static_cast<size_t>(rows * heads * sizes.head_dim);
    };
    q = random_numbers(of_rows(sizes.query_heads), rng);
    keys = random_numbers(of_rows(sizes.kv_heads), rng);
    values = random_numbers(of_rows(sizes.kv_heads), rng);
    const int64_t width = sizes.kv_heads * sizes.head_dim;
    const auto nan = __float2bfloat16(NAN);
    paged_keys.assign(static_cast<size_t>(blocks * kBlockKeys * width), nan);
    paged_values = paged_keys;
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t page = pages[static_cast<size_t>(starts[row] + positions[row] / kBlockKeys)];
      const int64_t place = (page * kBlockKeys + positions[row] % kBlockKeys) * width;
      std::copy_n(&keys[row * width], width, &paged_keys[place]);
      std::copy_n(&values[row * width], width, &paged_values[place]);
    }
  }
  int64_t rows() const { return static_cast<int64_t>(positions.size()); }
  int64_t width() const { return sizes.query_heads * sizes.head_dim; }

  std::vector<AttentionTile> tiles(int64_t most) const {
    std::vector<AttentionTile> out;
    for (size_t s = 0; s < lengths.size(); ++s) {
      for (int64_t p = 0; p < lengths[s]; p += most) {
        out.push_back({static_cast<int32_t>(first_rows[s] + p),
                       static_cast<int32_t>(std::min<int64_t>(most, lengths[s] - p))});
      }
    }
    return out;
  }
};

struct OnDevice {
  explicit OnDevice(const Problem& p)
      : problem(p),
        positions(p.positions),
        starts(p.starts),
        pages(p.pages),
        q(p.q),
        keys(p.keys),
        values(p.values),
        paged_keys(p.paged_keys),
        paged_values(p.paged_values),
        out(p.q.size()),
        lse(static_cast<size_t>(p.rows() * p.sizes.query_heads)),
        counters(std::vector<int32_t>{0, 0}) {}

  Attention attention(bool paged) const {
    Attention at;
    at.sizes = problem.sizes;
    at.places = {problem.rows(), positions.data(), paged ? starts.data() : nullptr,
                 paged ? pages.data() : nullptr};
    at.q = q.data(), at.q_stride = problem.width();
    at.keys = paged ? paged_keys.data() : keys.data();
    at.values = paged ? paged_values.data() : values.data();
    at.key_stride = at.value_stride = problem.sizes.kv_heads * problem.sizes.head_dim;
    at.out = out.data();
    at.lse = lse.data(), at.lse_row = 1, at.lse_head = problem.rows();
    return at;
  }
  Numbers by_tiles(bool paged, int64_t most_rows, bool counted = false) const {
    const DeviceArray<AttentionTile> tiles(problem.tiles(most_rows));
    Attention at = attention(paged);
    if (counted) at.counters = counters.data();
    check_cuda(cudaMemset(at.out, 0xff, problem.q.size() * sizeof(__nv_bfloat16)), "a NaN");
    attend_tiles(at, tiles.data(), static_cast<int64_t>(problem.tiles(most_rows).size()), nullptr);
    return out.values();
  }
  // Rows [first, first + count) as decode rows of a pass of their own.
  Numbers by_decoding(int64_t first, int64_t count, int64_t most_positions) const {
    const DeviceArray<float> space(
        static_cast<size_t>(decode_workspace(problem.sizes, most_positions)));
    Attention at = attention(true);
    at.places.positions += first, at.places.starts += first, at.places.rows = count;
    at.q = q.data() + first * problem.width();
    const DeviceArray<__nv_bfloat16> result(static_cast<size_t>(count * problem.width()));
    at.out = result.data();
    attend_decode_rows(at, nullptr, count, most_positions, space.data(), nullptr);
    return result.values();
  }

  const Problem& problem;
  DeviceArray<int32_t> positions, starts, pages;
  DeviceArray<__nv_bfloat16> q, keys, values, paged_keys, paged_values, out;
  DeviceArray<float> lse;
  DeviceArray<int32_t> counters;
};

// Largest difference from the reference in double, of results and of their log-sum-exp.
struct Difference {
  double out = 0.0, lse = 0.0;
};
Difference from_reference(const Problem& p, const Numbers& out, const std::vector<float>& lse) {
  const auto& [query_heads, kv_heads, dim] = p.sizes;
  const int64_t group = query_heads / kv_heads;
  Difference most;
  for (int64_t row = 0; row < p.rows(); ++row) {
    const int64_t first = row - p.positions[row];
    for (int64_t head = 0; head < query_heads; ++head) {
      std::vector<double> scores;
      double largest = -INFINITY;
      for (int64_t key = first; key <= row; ++key) {
        double score = 0.0;
        for (int64_t d = 0; d < dim; ++d) {
          score += double{__bfloat162float(p.q[row * p.width() + head * dim + d])} *
                   double{__bfloat162float(p.keys[(key * kv_heads + head / group) * dim + d])};
        }
        scores.push_back(score / std::sqrt(static_cast<double>(dim)));
        largest = std::max(largest, scores.back());
      }
      double sum = 0.0;
      for (double& score : scores) sum += score = std::exp(score - largest);
      most.lse = std::max(most.lse, std::abs(largest + std::log(sum) - lse[head * p.rows() + row]));
      for (int64_t d = 0; d < dim; ++d) {
        double value = 0.0;
        for (int64_t key = first; key <= row; ++key) {
          value += scores[static_cast<size_t>(key - first)] / sum *
                   double{__bfloat162float(p.values[(key * kv_heads + head / group) * dim + d])};
        }
        const double got = __bfloat162float(out[row * p.width() + head * dim + d]);
        most.out = std::max(most.out, std::isnan(got) ? INFINITY : std::abs(got - value));
      }
    }
  }
  return most;
}

const std::vector<HeadSizes> kSizes = {{4, 2, 64}, {16, 8, 128}, {3, 3, 16},  {9, 3, 64},
                                       {8, 1, 40}, {20, 1, 32},  {2, 1, 256}, {3, 3, 128},
                                       {7, 1, 64}, {6, 2, 80}};
const std::vector<int> kLengths = {1, 2, 15, 16, 17, 63, 64, 65, 130, 200};

std::string text_of(const HeadSizes& sizes) {
  return std::to_string(sizes.query_heads) + " heads on " + std::to_string(sizes.kv_heads) +
         " of " + std::to_string(sizes.head_dim);
}

TEST(Attention, EqualsAReferenceInDouble) {
  LEEWAY_NEEDS_GPU();
  for (const HeadSizes& sizes : kSizes) {
    const Problem problem(sizes, kLengths);
    const OnDevice device(problem);
    for (const bool paged : {false, true}) {
      const Numbers out = device.by_tiles(paged, kAttentionTileRows);
      const Difference difference = from_reference(problem, out, device.lse.values());
      EXPECT_LT(difference.out, 0.03) << text_of(sizes);  // bf16 weights and results
      EXPECT_LT(difference.lse, 1e-4) << text_of(sizes);
    }
  }
}

TEST(Attention, ARowHasTheSameBitsHoweverItIsComputed) {
  LEEWAY_NEEDS_GPU();
  int64_t compared = 0;
  for (const HeadSizes& sizes : kSizes) {
    std::vector<int> lengths = kLengths;
    lengths.insert(lengths.end(), {511, 512, 513, 1100});
    const Problem problem(sizes, lengths);
    const OnDevice device(problem);
    const auto packed = bits_of(device.by_tiles(false, kAttentionTileRows));
    const std::vector<float> lse = device.lse.values();
    const std::vector<int64_t> most_rows = {kAttentionTileRows, 100, 64, 48, 7, 1};
    for (const int64_t rows : most_rows) {
      for (const bool paged : {false, true}) {
        for (const bool counted : {false, true}) {
          EXPECT_EQ(bits_of(device.by_tiles(paged, rows, counted)), packed)
              << text_of(sizes) << ", " << rows << (paged ? ", paged" : "")
              << (counted ? ", counted" : "");
          EXPECT_EQ(device.lse.values(), lse) << text_of(sizes) << ", " << rows;
          compared += problem.rows();
        }
      }
    }
    EXPECT_EQ(device.counters.values(), (std::vector<int32_t>{0, 0})) << text_of(sizes);
    // All rows at once are not split; few are, where sequences may be long.
    EXPECT_EQ(bits_of(device.by_decoding(0, problem.rows(), 2048)), packed) << text_of(sizes);
    for (const int64_t count : {int64_t{1}, int64_t{3}, int64_t{40}}) {
      for (int64_t first = problem.rows() - count; first >= 0; first -= 331) {
        const auto got = bits_of(device.by_decoding(first, count, 32768));
        const std::vector<uint16_t> wanted(packed.begin() + first * problem.width(),
                                           packed.begin() + (first + count) * problem.width());
        EXPECT_EQ(got, wanted) << text_of(sizes) << ", " << count << " rows from " << first;
        compared += count;
      }
    }
    compared += 2 * problem.rows();
  }
  std::printf("%lld rows compared\n", static_cast<long long>(compared));
}

TEST(Attention, PaddingRowsAreZero) {
  LEEWAY_NEEDS_GPU();
  const Problem problem({4, 2, 64}, {20, 30});
  const OnDevice device(problem);
  const DeviceArray<int32_t> positions(std::vector<int32_t>{19, -1, -1});
  const DeviceArray<int32_t> starts(std::vector<int32_t>{0, 0, 0});
  const DeviceArray<float> space(static_cast<size_t>(decode_workspace(problem.sizes, 4096)));
  Attention at = device.attention(true);
  at.places.positions = positions.data(), at.places.starts = starts.data(), at.places.rows = 3;
  attend_decode_rows(at, nullptr, 3, 4096, space.data(), nullptr);
  const Numbers out = device.out.values();
  for (int64_t i = problem.width(); i < 3 * problem.width(); ++i) {
    ASSERT_EQ(__bfloat162float(out[static_cast<size_t>(i)]), 0.0f);
  }
}

TEST(Attention, WhatARowCannotSeeDoesNotReachIt) {
  LEEWAY_NEEDS_GPU();
  Problem problem({4, 2, 64}, {100, 70});
  const Numbers before = OnDevice(problem).by_tiles(false, kAttentionTileRows);
  const int64_t width = problem.sizes.kv_heads * problem.sizes.head_dim;
  std::fill(problem.values.begin() + 100 * width, problem.values.end(), __float2bfloat16(NAN));
  std::fill(problem.keys.begin() + 100 * width, problem.keys.end(), __float2bfloat16(NAN));
  const Numbers after = OnDevice(problem).by_tiles(false, kAttentionTileRows);
  const auto first = [&](const Numbers& all) {
    return bits_of(Numbers(all.begin(), all.begin() + 100 * problem.width()));
  };
  EXPECT_EQ(first(before), first(after));
}

TEST(Attention, HeadDimensionsThatDoNotFitAreRefused) {
  Attention attention;
  attention.sizes = {2, 1, 12};
  EXPECT_THROW(attend_tiles(attention, nullptr, 1, nullptr), Error);
  attention.sizes.head_dim = 264;
  EXPECT_THROW(attend_tiles(attention, nullptr, 1, nullptr), Error);
}

}  // namespace
}  // namespace leeway::cuda
