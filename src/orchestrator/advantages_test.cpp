#include "orchestrator/advantages.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "base/rng.h"
#include "orchestrator/environment_test_support.h"

namespace leeway {
namespace {

using ::leeway::testing::expect_refused;

// Those that compare the rollouts of a group, and all.
constexpr AdvantageKind kGroup[] = {AdvantageKind::group_mean, AdvantageKind::group_deviation,
                                    AdvantageKind::leave_one_out, AdvantageKind::max_rl,
                                    AdvantageKind::reinforce_pp};
constexpr AdvantageKind kAll[] = {AdvantageKind::group_mean,    AdvantageKind::group_deviation,
                                  AdvantageKind::leave_one_out, AdvantageKind::max_rl,
                                  AdvantageKind::reinforce_pp,  AdvantageKind::batch_mean,
                                  AdvantageKind::none};

AdvantageResult advantages_of(const std::vector<GroupRewards>& groups, AdvantageKind kind,
                              double length_penalty = 0.0) {
  return compute_advantages(groups, {.kind = kind, .length_penalty = length_penalty});
}

std::vector<double> of_group(const std::vector<double>& rewards, AdvantageKind kind) {
  return advantages_of({{rewards, {}}}, kind).advantages.front();
}

std::vector<double> random_rewards(Rng& rng, size_t count) {
  std::vector<double> rewards(count);
  for (double& reward : rewards) reward = rng.below(2) == 0 ? rng.normal() : rng.uniform();
  return rewards;
}

std::vector<GroupRewards> random_batch(Rng& rng) {
  std::vector<GroupRewards> groups(1 + rng.below(5));
  for (GroupRewards& group : groups) {
    group.rewards = random_rewards(rng, 1 + rng.below(9));
    for (size_t i = 0; i < group.rewards.size(); ++i) {
      group.lengths.push_back(static_cast<int64_t>(rng.below(100)));
    }
  }
  return groups;
}

double sum(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0);
}

template <typename T>
void shuffle(std::vector<T>& values, Rng& rng) {
  for (size_t i = values.size(); i > 1; --i) std::swap(values[i - 1], values[rng.below(i)]);
}

TEST(Advantages, OfOneRightAnswerInFourAreTheDefinitions) {
  const std::vector<double> rewards{1, 0, 0, 0};  // mean 1/4, unbiased deviation 1/2
  const auto expect = [&](AdvantageKind kind, double right, double wrong) {
    const std::vector<double> got = of_group(rewards, kind);
    EXPECT_DOUBLE_EQ(got[0], right);
    for (size_t i = 1; i < 4; ++i) EXPECT_DOUBLE_EQ(got[i], wrong);
  };
  expect(AdvantageKind::group_mean, 0.75, -0.25);
  expect(AdvantageKind::group_deviation, 1.5, -0.5);
  expect(AdvantageKind::leave_one_out, 1.0, -1.0 / 3.0);
  expect(AdvantageKind::max_rl, 3.0, -1.0);
  // sqrt((9 + 1 + 1 + 1) / 16 / 4) = sqrt(3) / 4
  expect(AdvantageKind::reinforce_pp, std::sqrt(3.0), -1.0 / std::sqrt(3.0));
}

TEST(Advantages, OfAGroupAddUpToZero) {
  Rng rng(1);
  for (int round = 0; round < 500; ++round) {
    const std::vector<GroupRewards> groups = random_batch(rng);
    for (const AdvantageKind kind : {AdvantageKind::group_mean, AdvantageKind::leave_one_out,
                                     AdvantageKind::group_deviation, AdvantageKind::reinforce_pp}) {
      for (const std::vector<double>& group : advantages_of(groups, kind).advantages) {
        // A few roundings of numbers below 10; a small deviation makes more of them.
        const bool scaled =
            kind == AdvantageKind::group_deviation || kind == AdvantageKind::reinforce_pp;
        EXPECT_NEAR(sum(group), 0.0, scaled ? 1e-10 : 1e-13);
      }
    }
  }
}

TEST(Advantages, ByLeaveOneOutAreTheDistanceFromTheMeanOfTheOthers) {
  Rng rng(2);
  for (int round = 0; round < 200; ++round) {
    const std::vector<double> rewards = random_rewards(rng, 2 + rng.below(8));
    const std::vector<double> got = of_group(rewards, AdvantageKind::leave_one_out);
    for (size_t i = 0; i < rewards.size(); ++i) {
      const double others = (sum(rewards) - rewards[i]) / static_cast<double>(rewards.size() - 1);
      EXPECT_NEAR(got[i], rewards[i] - others, 1e-13);
    }
  }
}

TEST(Advantages, ByDeviationHaveDeviationOne) {
  Rng rng(3);
  for (int round = 0; round < 200; ++round) {
    const std::vector<double> got =
        of_group(random_rewards(rng, 2 + rng.below(8)), AdvantageKind::group_deviation);
    double squares = 0.0;
    for (const double a : got) squares += a * a;
    EXPECT_NEAR(squares / static_cast<double>(got.size() - 1), 1.0, 1e-12);
  }
}

TEST(Advantages, OfReinforcePpHaveDeviationOneOverTheBatch) {
  Rng rng(4);
  for (int round = 0; round < 200; ++round) {
    std::vector<GroupRewards> groups = random_batch(rng);
    groups.push_back({{0.25, 0.5}, {1, 1}});  // so that not all are equal
    const AdvantageResult result = advantages_of(groups, AdvantageKind::reinforce_pp);
    double squares = 0.0, count = 0.0;
    for (const auto& group : result.advantages) {
      for (const double a : group) squares += a * a, count += 1.0;
    }
    EXPECT_NEAR(squares / count, 1.0, 1e-12);
  }
}

TEST(Advantages, OfEqualRewardsAreExactlyZeroWhereRolloutsAreCompared) {
  for (const AdvantageKind kind : kAll) {
    if (kind == AdvantageKind::none) continue;
    for (const double reward : {0.1, 1.0 / 3.0, -0.7, 0.0, 1e300, 5e-324, 1.0}) {
      for (size_t count = 2; count <= 33; ++count) {
        const auto result = advantages_of({{std::vector<double>(count, reward), {}}}, kind);
        for (const double a : result.advantages.front()) EXPECT_EQ(a, 0.0);
        EXPECT_EQ(result.zero_variance_groups, 1);
        EXPECT_EQ(result.singleton_groups, 0);
      }
    }
  }
}

TEST(Advantages, OfAGroupOfOneAreZeroAndCounted) {
  for (const AdvantageKind kind : kGroup) {
    const auto result =
        advantages_of({{{3.7}, {}}, {{-0.1}, {}}, {{2, 2}, {}}, {{1, 2}, {}}}, kind);
    EXPECT_EQ(result.advantages[0], std::vector<double>{0.0});
    EXPECT_EQ(result.advantages[1], std::vector<double>{0.0});
    EXPECT_EQ(result.singleton_groups, 2);
    EXPECT_EQ(result.zero_variance_groups, 1);
    EXPECT_LT(result.advantages[3][0], result.advantages[3][1]);
  }
}

TEST(Advantages, OfMaxRlAreZeroWhereTheMeanIsNotPositive) {
  for (const std::vector<double>& rewards :
       {std::vector<double>{-1, 1}, {-3, 1, 1}, {-1, 0}, {-0.5, 0.25, 0.25}}) {
    for (const double a : of_group(rewards, AdvantageKind::max_rl)) EXPECT_EQ(a, 0.0);
  }
}

TEST(Advantages, WithoutABaselineAreTheRewards) {
  Rng rng(8);
  for (int round = 0; round < 100; ++round) {
    const std::vector<GroupRewards> groups = random_batch(rng);
    const AdvantageResult result = advantages_of(groups, AdvantageKind::none);
    for (size_t g = 0; g < groups.size(); ++g) {
      EXPECT_EQ(result.advantages[g], groups[g].rewards);
    }
  }
  const AdvantageResult result =
      advantages_of({{{2, 2}, {}}, {{0, 0}, {}}, {{3}, {}}, {{0}, {}}}, AdvantageKind::none);
  EXPECT_EQ(result.advantages, (std::vector<std::vector<double>>{{2, 2}, {0, 0}, {3}, {0}}));
  EXPECT_EQ(result.zero_variance_groups, 1) << "equal rewards other than 0 are a signal";
  EXPECT_EQ(result.singleton_groups, 2);
}

TEST(Advantages, ByBatchMeanAddUpToZeroOverTheBatchAndKeepDifferencesBetweenPrompts) {
  Rng rng(9);
  for (int round = 0; round < 100; ++round) {
    const std::vector<GroupRewards> groups = random_batch(rng);
    double total = 0.0;
    for (const auto& group : advantages_of(groups, AdvantageKind::batch_mean).advantages) {
      total += sum(group);
    }
    EXPECT_NEAR(total, 0.0, 1e-12);  // some fifty roundings of numbers below 10
  }
  const AdvantageResult result =
      advantages_of({{{1, 1}, {}}, {{0, 0}, {}}, {{0.5}, {}}}, AdvantageKind::batch_mean);
  EXPECT_EQ(result.advantages, (std::vector<std::vector<double>>{{0.5, 0.5}, {-0.5, -0.5}, {0}}));
  EXPECT_EQ(result.zero_variance_groups, 0);
  EXPECT_EQ(result.singleton_groups, 1);
}

TEST(Advantages, DoNotDependOnTheOrderOfRolloutsAndGroups) {
  Rng rng(5);
  for (int round = 0; round < 200; ++round) {
    const std::vector<GroupRewards> groups = random_batch(rng);
    std::vector<size_t> group_order(groups.size());
    std::iota(group_order.begin(), group_order.end(), size_t{0});
    shuffle(group_order, rng);
    std::vector<std::vector<size_t>> orders;
    std::vector<GroupRewards> moved;
    for (const size_t g : group_order) {
      std::vector<size_t> order(groups[g].rewards.size());
      std::iota(order.begin(), order.end(), size_t{0});
      shuffle(order, rng);
      GroupRewards group;
      for (const size_t i : order) {
        group.rewards.push_back(groups[g].rewards[i]);
        group.lengths.push_back(groups[g].lengths[i]);
      }
      moved.push_back(group);
      orders.push_back(order);
    }
    for (const AdvantageKind kind : kAll) {
      const auto expected = advantages_of(groups, kind, 0.25).advantages;
      const auto got = advantages_of(moved, kind, 0.25).advantages;
      for (size_t g = 0; g < moved.size(); ++g) {
        for (size_t i = 0; i < orders[g].size(); ++i) {
          EXPECT_EQ(got[g][i], expected[group_order[g]][orders[g][i]]);  // to the bit
        }
      }
    }
  }
}

TEST(Advantages, KeepTheOrderOfTheRewards) {
  Rng rng(6);
  for (int round = 0; round < 200; ++round) {
    const std::vector<double> rewards = random_rewards(rng, 2 + rng.below(8));
    for (const AdvantageKind kind : kAll) {
      const std::vector<double> got = of_group(rewards, kind);
      for (size_t i = 0; i < got.size(); ++i) {
        for (size_t j = 0; j < got.size(); ++j) {
          if (rewards[i] < rewards[j]) {
            EXPECT_LE(got[i], got[j]);
          }
        }
      }
    }
  }
}

TEST(Advantages, OfTinyDifferencesDoNotVanish) {
  const std::vector<double> got = of_group({1e-200, 3e-200}, AdvantageKind::group_deviation);
  EXPECT_NEAR(got[0], -std::sqrt(0.5), 1e-12);
  EXPECT_NEAR(got[1], std::sqrt(0.5), 1e-12);
}

TEST(LengthShaping, TakesFromTheLongAmongTheBestAlone) {
  const GroupRewards group{{1, 0, 1, 1, 0.5}, {10, 1, 20, 30, 500}};
  const auto got = advantages_of({group}, AdvantageKind::group_mean, 0.4).advantages.front();
  const auto shaped = of_group({1, 0, 0.8, 0.6, 0.5}, AdvantageKind::group_mean);
  for (size_t i = 0; i < got.size(); ++i) EXPECT_DOUBLE_EQ(got[i], shaped[i]);
}

TEST(LengthShaping, MakesAllRightAnswersDiffer) {
  const auto result = advantages_of({{{1, 1, 1}, {5, 6, 7}}}, AdvantageKind::group_mean, 0.1);
  EXPECT_EQ(result.zero_variance_groups, 0);
  EXPECT_GT(result.advantages[0][0], result.advantages[0][1]);
  EXPECT_GT(result.advantages[0][1], result.advantages[0][2]);
}

TEST(LengthShaping, LeavesEqualLengthsAndGroupsWithoutSuccessAlone) {
  const auto result = advantages_of({{{1, 1}, {5, 5}}, {{0, 0}, {5, 500}}, {{-1, -1}, {1, 2}}},
                                    AdvantageKind::group_deviation, 0.5);
  EXPECT_EQ(result.zero_variance_groups, 3);
  for (const auto& group : result.advantages) EXPECT_EQ(group, std::vector<double>(2, 0.0));
}

TEST(LengthShaping, KeepsTheBestAboveTheRestForSmallPenalties) {
  Rng rng(7);
  for (int round = 0; round < 200; ++round) {
    GroupRewards group;
    for (int i = 0; i < 8; ++i) {
      group.rewards.push_back(static_cast<double>(rng.below(2)));
      group.lengths.push_back(static_cast<int64_t>(rng.below(50)));
    }
    const auto got = advantages_of({group}, AdvantageKind::group_mean, 0.9).advantages.front();
    for (size_t i = 0; i < 8; ++i) {
      for (size_t j = 0; j < 8; ++j) {
        if (group.rewards[i] > group.rewards[j]) {
          EXPECT_GT(got[i], got[j]);
        }
        if (group.rewards[i] == 1 && group.rewards[j] == 1 && group.lengths[i] < group.lengths[j]) {
          EXPECT_GT(got[i], got[j]);
        }
        if (group.rewards[i] == 0 && group.rewards[j] == 0) {
          EXPECT_EQ(got[i], got[j]);
        }
      }
    }
  }
}

TEST(Advantages, OfNoGroupsAreNone) {
  for (const AdvantageKind kind : kAll) EXPECT_TRUE(advantages_of({}, kind).advantages.empty());
}

TEST(Advantages, RefuseWhatIsNoReward) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  const auto refused = [](const std::vector<GroupRewards>& groups, double penalty,
                          const std::vector<std::string>& words) {
    expect_refused([&] { advantages_of(groups, AdvantageKind::group_mean, penalty); }, words);
  };
  refused({{{1, 2}, {}}, {{}, {}}}, 0.0, {"group 1", "no rollouts"});
  refused({{{1, 2, nan}, {}}}, 0.0, {"rollout 2", "group 0", "nan"});
  refused({{{1}, {}}, {{-infinity, 2}, {}}}, 0.0, {"rollout 0", "group 1", "inf"});
  refused({{{1.7e308, -1.7e308, 1.7e308}, {}}}, 0.0, {"group 0", "too large"});
  refused({{{1, 2}, {1, 2}}}, -0.5, {"length_penalty is -0.5"});
  refused({{{1, 2}, {1, 2}}}, nan, {"length_penalty is nan"});
}

TEST(AdvantageKinds, AreKnownByName) {
  ASSERT_EQ(kNames<AdvantageKind>.size(), std::size(kAll));
  for (const AdvantageKind kind : kAll) {
    EXPECT_EQ(value_named<AdvantageKind>(name_of(kind)), kind);
  }
  EXPECT_STREQ(name_of(AdvantageKind::leave_one_out), "leave_one_out");
  EXPECT_EQ(value_named<AdvantageKind>("group_men"), std::nullopt);
  EXPECT_EQ(value_named<AdvantageKind>(""), std::nullopt);
}

}  // namespace
}  // namespace leeway
