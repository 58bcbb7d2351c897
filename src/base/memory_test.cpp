#include "base/memory.h"

#include <gtest/gtest.h>

namespace leeway {
namespace {

constexpr std::string_view kMeminfo =
    "MemTotal:       32000 kB\nMemFree:         1000 kB\nMemAvailable:    5000 kB\n"
    "SwapTotal:       2000 kB\nSwapFree:        1000 kB\n";

TEST(Memory, IsWhatTheSystemHasWithSwap) {
  EXPECT_EQ(available_memory({.meminfo = kMeminfo}), 6000u * 1024);
  EXPECT_EQ(available_memory({.meminfo = "MemAvailable: 7 kB"}), 7u * 1024);
}

TEST(Memory, IsWhatAContainerLeaves) {
  const std::string_view statistics = "anon 100\ninactive_file 300000\nactive_file 5\n";
  EXPECT_EQ(available_memory({kMeminfo, "2000000\n", "1500000\n", statistics}), 800000u);
  EXPECT_EQ(available_memory({"", "2000000\n", "1500000\n", ""}), 500000u);
  EXPECT_EQ(available_memory({"", "2000000\n", "2500000\n", ""}), 0u);
  EXPECT_EQ(available_memory({kMeminfo, "9000000\n", "0\n", ""}), 6000u * 1024) << "less";
  EXPECT_EQ(available_memory({kMeminfo, "max\n", "1500000\n", statistics}), 6000u * 1024);
}

TEST(Memory, IsUnknownWhereNothingSaysIt) {
  EXPECT_FALSE(available_memory({}).has_value());
  EXPECT_FALSE(available_memory({.meminfo = "MemAvailable: none\n"}).has_value());
}

TEST(Memory, OfThisMachineIsPositive) {
  const auto available = available_memory();
  ASSERT_TRUE(available.has_value());
  EXPECT_GT(*available, 0u);
}

}  // namespace
}  // namespace leeway
