#include "ranks/tree_sum.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <vector>

namespace leeway {
namespace {

constexpr size_t kBlock = 1024;  // floats; the blocks of all levels fit into the nearest cache

using Block = std::array<float, kBlock>;
using Terms = std::span<const float* const>;

bool any(Terms terms) {
  return std::any_of(terms.begin(), terms.end(), [](const float* term) { return term != nullptr; });
}

// The sum of `terms`, of which there is one at least, at begin .. begin + count: a pointer into the
// only term, or `sum`. `scratch` has two blocks per level below.
const float* block_sum(Terms terms, size_t begin, size_t count, Block& sum, Block* scratch) {
  if (terms.size() == 1) return terms[0] + begin;
  const size_t half = std::bit_floor(terms.size() - 1);
  const Terms left = terms.first(half), right = terms.subspan(half);
  if (!any(right)) return block_sum(left, begin, count, sum, scratch);
  if (!any(left)) return block_sum(right, begin, count, sum, scratch);
  const float* a = block_sum(left, begin, count, scratch[0], scratch + 2);
  const float* b = block_sum(right, begin, count, scratch[1], scratch + 2);
  for (size_t i = 0; i < count; ++i) sum[i] = a[i] + b[i];
  return sum.data();
}

}  // namespace

bool tree_sum(Terms terms, std::span<float> out) {
  if (!any(terms)) return false;
  Block sum;
  std::vector<Block> scratch(2 * static_cast<size_t>(std::bit_width(terms.size())));
  for (size_t begin = 0; begin < out.size(); begin += kBlock) {
    const size_t count = std::min(kBlock, out.size() - begin);
    const float* result = block_sum(terms, begin, count, sum, scratch.data());
    if (result != out.data() + begin) std::copy_n(result, count, out.data() + begin);
  }
  return true;
}

}  // namespace leeway
