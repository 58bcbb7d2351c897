// One assertion that fails. ctest expects this program to fail, which proves that a failure of any
// other program would be noticed.

#include <gtest/gtest.h>

TEST(RunnerProof, Fails) { EXPECT_EQ(1, 2); }
