// Times as a person says them.

#include "run/durations.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace leeway {
namespace {

TEST(Durations, HaveTheTwoLargestUnits) {
  const std::pair<double, const char*> cases[] = {
      {0, "0 s"},
      {0.004, "0 s"},
      {0.04, "0.04 s"},
      {0.444, "0.44 s"},
      {0.996, "1 s"},
      {8, "8 s"},
      {11.51, "11.5 s"},
      {59.94, "59.9 s"},
      {59.96, "1 min"},
      {60, "1 min"},
      {61.4, "1 min 1 s"},
      {119.7, "2 min"},
      {125, "2 min 5 s"},
      {3599.4, "59 min 59 s"},
      {3599.6, "1 h"},
      {3629, "1 h"},
      {3631, "1 h 1 min"},
      {8460, "2 h 21 min"},
      {86369, "23 h 59 min"},
      {86371, "1 d"},
      {273600, "3 d 4 h"},
      {864000, "10 d"},
  };
  for (const auto& [seconds, text] : cases) EXPECT_EQ(duration_text(seconds), text) << seconds;
}

TEST(Durations, ThatAreNoneAreAQuestionMark) {
  EXPECT_EQ(duration_text(std::nan("")), "?");
  EXPECT_EQ(duration_text(-1), "?");
  EXPECT_EQ(duration_text(std::numeric_limits<double>::infinity()), "?");
}

TEST(Durations, LeftAreInWholeSeconds) {
  EXPECT_EQ(time_left_text(8.4), "8 s left");
  EXPECT_EQ(time_left_text(8460), "2 h 21 min left");
  EXPECT_EQ(time_left_text(0.2), "0 s left");
}

TEST(Rates, AreOfTheSmallestTimeInWhichSomethingHappens) {
  EXPECT_EQ(rate_text(5, 2, "runs"), "2.5 runs/s");
  EXPECT_EQ(rate_text(2, 60, "runs"), "2.0 runs/min");
  EXPECT_EQ(rate_text(1, 1800, "runs"), "2.0 runs/h");
  EXPECT_EQ(rate_text(1, 43200, "runs"), "2.0 runs/d");
  EXPECT_EQ(rate_text(0, 10, "runs"), "0 runs/s");
}

}  // namespace
}  // namespace leeway
