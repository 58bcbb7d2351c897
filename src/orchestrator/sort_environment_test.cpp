#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <set>

#include "orchestrator/environment_factories.h"
#include "orchestrator/environment_test_support.h"

namespace leeway {
namespace {

using ::leeway::testing::expect_refused;
using ::leeway::testing::parts_of;
using ::leeway::testing::plain_reply;
using ::leeway::testing::prompt_of;
using ::leeway::testing::rendered_reply;

std::unique_ptr<Environment> sort_environment(int64_t least, int64_t most, uint64_t seed = 1) {
  return make_sort_environment({.name = "sort", .min_length = least, .max_length = most}, seed);
}

TEST(SortEnvironment, AsksForDistinctLettersInOrder) {
  const auto environment = sort_environment(4, 8);
  EXPECT_EQ(environment->size(Split::train), std::nullopt);
  EXPECT_FALSE(environment->needs_renderer());
  std::array<int, 9> lengths{};
  std::array<int, 26> first{};
  for (uint64_t i = 0; i < 2600; ++i) {
    const Example example = environment->example(Split::train, i);
    EXPECT_EQ(example.index, i);
    std::string prompt = prompt_of(example);
    ASSERT_EQ(prompt.back(), '=');
    prompt.pop_back();
    ASSERT_GE(prompt.size(), 4u);
    ASSERT_LE(prompt.size(), 8u);
    ++lengths[prompt.size()];
    ++first[static_cast<size_t>(prompt.front() - 'a')];
    const std::set<char> letters(prompt.begin(), prompt.end());
    EXPECT_EQ(letters.size(), prompt.size());
    EXPECT_EQ(example.answer, std::string(letters.begin(), letters.end()) + "\n");
  }
  // 520 and 100 are expected; five deviations.
  for (size_t n = 4; n <= 8; ++n) EXPECT_NEAR(lengths[n], 520, 5 * 20.4);
  for (const int count : first) EXPECT_NEAR(count, 100, 5 * 9.8);
}

TEST(SortEnvironment, GivesTheSameExampleForTheSameNumber) {
  const auto a = sort_environment(4, 8, 7), b = sort_environment(4, 8, 7);
  const auto other = sort_environment(4, 8, 8);
  int same = 0;
  for (uint64_t i = 0; i < 100; ++i) {
    // Asked for in other orders.
    const std::string prompt = prompt_of(a->example(Split::train, i));
    EXPECT_EQ(prompt, prompt_of(b->example(Split::train, i)));
    b->example(Split::held_out, 99 - i);
    EXPECT_EQ(prompt, prompt_of(b->example(Split::train, i)));
    same += prompt == prompt_of(other->example(Split::train, i));
  }
  EXPECT_LT(same, 3);
}

TEST(SortEnvironment, NeverTrainsOnAHeldOutPromptWhateverTheSeed) {
  // Few prompts, so that splits that are not disjoint would meet.
  const auto one = sort_environment(2, 2, 1), two = sort_environment(2, 2, 2);
  std::set<std::string> train, held_out;
  for (uint64_t i = 0; i < 10'000; ++i) {
    train.insert(prompt_of(one->example(Split::train, i)));
    held_out.insert(prompt_of(two->example(Split::held_out, i)));
  }
  for (const std::string& prompt : held_out) EXPECT_FALSE(train.contains(prompt)) << prompt;
  EXPECT_EQ(train.size() + held_out.size(), 26u * 25u);
  EXPECT_NEAR(static_cast<double>(held_out.size()), 26 * 25 / 8.0, 45.0);  // five deviations
}

TEST(SortEnvironment, RewardsTheWholeAnswerAndNothingElse) {
  const auto environment = sort_environment(4, 8);
  Example example = environment->example(Split::train, 0);
  example.answer = "beqx\n";
  const auto reward = [&](const Reply& reply) { return parts_of(*environment, example, reply); };
  EXPECT_EQ(reward(plain_reply("beqx\n")), "exact 1 * 1");
  for (const char* wrong : {"", "beqx", "beqx\n\n", " beqx\n", "bexq\n", "beqx\nb", "BEQX\n",
                            "beqx\r\n", "beq\n", "beqxz\n"}) {
    EXPECT_EQ(reward(plain_reply(wrong)), "exact 1 * 0") << wrong;
    EXPECT_EQ(reward(plain_reply(wrong, true)), "exact 1 * 0") << wrong;
  }
  EXPECT_EQ(reward(rendered_reply("beqx")), "exact 1 * 1");
  EXPECT_EQ(reward(rendered_reply("\n\nbeqx\n")), "exact 1 * 1");
  EXPECT_EQ(reward(rendered_reply("beqx", false)), "exact 1 * 0");
  EXPECT_EQ(reward(rendered_reply("bexq")), "exact 1 * 0");
  EXPECT_EQ(reward(rendered_reply("")), "exact 1 * 0");
}

TEST(SortEnvironment, ItsDemonstrationsEarnTheFullReward) {
  const auto environment = sort_environment(1, 26);
  for (uint64_t i = 0; i < 200; ++i) {
    const Example example = environment->example(Split::train, i);
    ASSERT_EQ(example.demonstration.size(), 1u);
    EXPECT_EQ(example.demonstration[0].role, Role::assistant);
    EXPECT_EQ(parts_of(*environment, example, plain_reply(example.demonstration[0].content)),
              "exact 1 * 1");
  }
}

TEST(SortEnvironment, RefusesLengthsThatNoAlphabetHas) {
  for (const auto& [least, most] :
       std::vector<std::pair<int64_t, int64_t>>{{0, 4}, {-1, 3}, {5, 4}, {4, 27}, {27, 27}}) {
    const int64_t low = least, high = most;
    expect_refused([&] { sort_environment(low, high); },
                   {"min_length = " + std::to_string(low), "max_length = " + std::to_string(high)});
  }
}

}  // namespace
}  // namespace leeway
