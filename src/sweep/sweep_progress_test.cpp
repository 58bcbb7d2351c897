// The progress of a sweep, as text.

#include "sweep/sweep_progress.h"

#include <gtest/gtest.h>

namespace leeway {
namespace {

TEST(SweepProgress, CountsWhatRunningRunsHaveDone) {
  // A sweep that started with 2 of 12 finished and has done one and a half since, in 9 minutes.
  EXPECT_EQ(sweep_progress_text(12, 2, 3, 2, 0.5, 540),
            "3/12 runs done, 2 running, 29 %, 10.0 runs/h, 51 min left");
  EXPECT_EQ(sweep_progress_text(12, 2, 2, 2, 0.0, 540), "2/12 runs done, 2 running, 17 %");
}

}  // namespace
}  // namespace leeway
