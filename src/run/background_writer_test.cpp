#include "run/background_writer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <stdexcept>

namespace leeway {
namespace {

TEST(BackgroundWriter, WritesBesideTheCallerAndOneJobAtATime) {
  std::mutex mutex;
  std::condition_variable changed;
  bool go = false;
  std::atomic<int> running = 0, most = 0, done = 0;
  const auto job = [&] {
    most = std::max(most.load(), ++running);
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return go; });
    --running;
    ++done;
  };
  {
    BackgroundWriter writer;
    writer.start("first", job);
    EXPECT_EQ(done, 0);  // the caller continues meanwhile
    {
      const std::lock_guard lock(mutex);
      go = true;
    }
    changed.notify_all();
    writer.start("second", job);
    EXPECT_GE(done, 1);
    writer.wait();
    EXPECT_EQ(done, 2);
    writer.start("third", job);
  }
  EXPECT_EQ(done, 3);
  EXPECT_EQ(most, 1);
}

TEST(BackgroundWriter, TellsOnceWhatFailed) {
  BackgroundWriter writer;
  EXPECT_TRUE(writer.take_failures().empty());
  writer.start("checkpoint of step 3", [] { throw std::runtime_error("the disk is full"); });
  writer.start("checkpoint of step 4", [] {});
  writer.wait();
  EXPECT_EQ(writer.take_failures(),
            std::vector<std::string>{"no checkpoint of step 3: the disk is full"});
  EXPECT_TRUE(writer.take_failures().empty());
}

}  // namespace
}  // namespace leeway
