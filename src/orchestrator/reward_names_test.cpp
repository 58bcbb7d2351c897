#include "orchestrator/reward_names.h"

#include <gtest/gtest.h>

namespace leeway {
namespace {

std::vector<std::string> names_of(const std::vector<RewardPart>& parts) {
  std::vector<std::string> names;
  for (const RewardPart& part : parts) names.push_back(part.name);
  return names;
}

TEST(RewardNames, FewNamesAreLeftAlone) {
  RewardNames names;
  for (int round = 0; round < 1000; ++round) {
    std::vector<RewardPart> parts = {{"exact", 1.0, 0.5}, {"format", 0.2, 1.0}};
    names.cap(parts);
    ASSERT_EQ(names_of(parts), (std::vector<std::string>{"exact", "format"}));
  }
  EXPECT_FALSE(names.take_warning());
}

TEST(RewardNames, TheRestIsOnePartWorthAsMuchAndAWarning) {
  RewardNames names;
  std::set<std::string> seen;
  for (int round = 0; round < 1000; ++round) {
    std::vector<RewardPart> parts = {{"exact", 1.0, 0.5},
                                     {"a" + std::to_string(round), 2.0, 3.0},
                                     {"b" + std::to_string(round), 0.5, 4.0}};
    names.cap(parts);
    double reward = 0.0;
    for (const RewardPart& part : parts) {
      seen.insert(part.name);
      reward += part.weight * part.value;
    }
    ASSERT_EQ(reward, 8.5);
    ASSERT_EQ(parts[0].name, "exact");
  }
  EXPECT_EQ(seen.size(), kMostRewardNames + 1);
  EXPECT_TRUE(seen.contains("other"));
  const std::optional<std::string> warning = names.take_warning();
  ASSERT_TRUE(warning);
  EXPECT_NE(warning->find("more than 64 names"), std::string::npos);
  EXPECT_FALSE(names.take_warning());
}

TEST(RewardNames, LongNamesAreNotKept) {
  RewardNames names;
  std::vector<RewardPart> parts = {{std::string(65, 'x'), 1.0, 1.0}, {std::string(64, 'y'), 1, 2}};
  names.cap(parts);
  EXPECT_EQ(names_of(parts), (std::vector<std::string>{std::string(64, 'y'), "other"}));
  EXPECT_TRUE(names.take_warning());
}

}  // namespace
}  // namespace leeway
