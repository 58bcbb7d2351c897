// The blocks of the sum against a readable tree, to the bit.

#include "ranks/tree_sum.h"

#include <gtest/gtest.h>

#include <cstring>
#include <optional>
#include <vector>

#include "base/rng.h"

namespace leeway {
namespace {

// Level by level: neighbours join, one without a neighbour moves up.
std::optional<float> tree_of(std::vector<std::optional<float>> level) {
  while (level.size() > 1) {
    std::vector<std::optional<float>> next;
    for (size_t i = 0; i < level.size(); i += 2) {
      if (i + 1 == level.size() || !level[i + 1]) {
        next.push_back(level[i]);
      } else {
        next.push_back(level[i] ? *level[i] + *level[i + 1] : level[i + 1]);
      }
    }
    level = next;
  }
  return level[0];
}

TEST(TreeSum, HasTheBitsOfTheReadableTree) {
  Rng rng(7);
  for (size_t ranks = 1; ranks <= 9; ++ranks) {
    for (const size_t length : {0, 1, 1023, 1024, 1025, 5000}) {
      for (int round = 0; round < 4; ++round) {
        // One longer: an empty vector has no address.
        std::vector<std::vector<float>> values(ranks, std::vector<float>(length + 1));
        std::vector<const float*> terms;
        bool expected = false;
        for (auto& term : values) {
          for (float& value : term) value = static_cast<float>(rng.uniform() - 0.5) * 1000.0f;
          const bool present = round == 0 || (round < 3 && rng.uniform() < 0.5);
          terms.push_back(present ? term.data() : nullptr);
          expected |= present;
        }
        std::vector<float> out(length, -7.0f);
        ASSERT_EQ(tree_sum(terms, out), expected) << ranks << " ranks";
        for (size_t i = 0; i < length; ++i) {
          std::vector<std::optional<float>> leaves;
          for (const float* term : terms) {
            leaves.push_back(term == nullptr ? std::nullopt : std::optional(term[i]));
          }
          const float wanted = tree_of(leaves).value_or(-7.0f);
          ASSERT_EQ(std::memcmp(&wanted, &out[i], sizeof wanted), 0)
              << ranks << " ranks, element " << i << " of " << length << ": " << out[i]
              << " instead of " << wanted;
        }
      }
    }
  }
}

TEST(TreeSum, MayOverwriteATerm) {
  std::vector<float> a(3000, 1.0f), b(3000, 2.0f), c(3000, 4.0f);
  const std::vector<const float*> terms = {a.data(), b.data(), c.data()};
  EXPECT_TRUE(tree_sum(terms, b));
  EXPECT_EQ(b, std::vector<float>(3000, 7.0f));
}

// A term that is left out is not a zero: the sign of -0 stays.
TEST(TreeSum, LeavesNothingBehindOfATermThatIsLeftOut) {
  const std::vector<float> a = {-0.0f};
  std::vector<float> out = {1.0f};
  const std::vector<const float*> terms = {nullptr, a.data(), nullptr, nullptr};
  EXPECT_TRUE(tree_sum(terms, out));
  EXPECT_TRUE(std::signbit(out[0]));
}

}  // namespace
}  // namespace leeway
