#include "trainer/gradient_tree.h"

#include <gtest/gtest.h>

#include <functional>

#include "base/rng.h"
#include "trainer/test_support.h"

namespace leeway {
namespace {

using Numbers = std::vector<float>;

// What the tree must give: halves first, slots that are left out do not count.
std::optional<Numbers> reference(std::span<const std::optional<Numbers>> slots) {
  if (slots.size() == 1) return slots[0];
  const auto left = reference(slots.first(slots.size() / 2));
  const auto right = reference(slots.subspan(slots.size() / 2));
  if (!left || !right) return left ? left : right;
  Numbers sum = *left;
  for (size_t i = 0; i < sum.size(); ++i) sum[i] += (*right)[i];
  return sum;
}

TEST(GradientTree, AddsHalvesWhicheverSlotsAreLeftOut) {
  const Parameters like = testing::make_policy();
  ThreadPool pool(2);
  Rng rng(5);
  GradientTree tree(like);
  for (const size_t count : {2, 4, 8, 16}) {
    for (int round = 0; round < 20; ++round) {
      std::vector<std::optional<Numbers>> slots(count);
      for (auto& slot : slots) {
        const bool any = rng.uniform() < 0.7;
        if (any) {
          const std::span<float> current = tree.current().flat();
          for (float& value : current) {
            ASSERT_EQ(value, 0.0f);  // each begins with zero
            value = static_cast<float>(rng.normal() * std::exp(8.0 * rng.normal()));
          }
          slot.emplace(current.begin(), current.end());
        }
        tree.end_slot(pool, any);
      }
      std::optional<Parameters> sum = tree.take_sum();
      const auto expected = reference(slots);
      ASSERT_EQ(sum.has_value(), expected.has_value());
      if (!sum) continue;
      ASSERT_TRUE(std::equal(expected->begin(), expected->end(), sum->flat().begin()));
      tree.give_back(std::move(*sum));
    }
  }
}

TEST(GradientTree, ForgetsWhatWasBegun) {
  const Parameters like = testing::make_policy();
  ThreadPool pool(1);
  GradientTree tree(like);
  for (int round = 0; round < 3; ++round) {
    for (float& value : tree.current().flat()) value = 1.0f;
    tree.end_slot(pool, true);
    for (float& value : tree.current().flat()) value = 2.0f;
    tree.clear();
  }
  tree.end_slot(pool, false);
  tree.end_slot(pool, false);
  EXPECT_FALSE(tree.take_sum());
}

}  // namespace
}  // namespace leeway
