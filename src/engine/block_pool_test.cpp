#include "engine/block_pool.h"

#include <gtest/gtest.h>

#include <map>

#include "base/rng.h"

namespace leeway {
namespace {

TEST(BlockPool, HandsOutEachBlockOnceAndTheLastFreedFirst) {
  BlockPool pool(4);
  for (int32_t expected = 0; expected < 4; ++expected) EXPECT_EQ(pool.take(), expected);
  EXPECT_EQ(pool.free(), 0);
  pool.release(1);
  pool.release(3);
  EXPECT_EQ(pool.take(), 3);
  EXPECT_EQ(pool.take(), 1);
}

TEST(BlockPool, FreesASharedBlockWithItsLastOwner) {
  BlockPool pool(2);
  const int32_t block = pool.take();
  pool.share(block);
  pool.share(block);
  pool.release(block);
  pool.release(block);
  EXPECT_EQ(pool.free(), 1);
  EXPECT_EQ(pool.owners(block), 1);
  pool.release(block);
  EXPECT_EQ(pool.free(), 2);
  EXPECT_EQ(pool.owners(block), 0);
}

TEST(BlockPool, CountsOwnersThroughRandomHistories) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    Rng rng(seed);
    BlockPool pool(1 + static_cast<int64_t>(rng.below(30)));
    std::map<int32_t, int32_t> owners;  // the model: blocks in use
    for (int step = 0; step < 500; ++step) {
      const auto some = [&] {
        return std::next(owners.begin(), static_cast<int64_t>(rng.below(owners.size())));
      };
      const uint64_t action = rng.below(3);
      if (action == 0 && pool.free() > 0) {
        ASSERT_TRUE(owners.emplace(pool.take(), 1).second) << "a block in use was handed out";
      } else if (action == 1 && !owners.empty()) {
        const auto it = some();
        pool.share(it->first);
        ++it->second;
      } else if (!owners.empty()) {
        const auto it = some();
        pool.release(it->first);
        if (--it->second == 0) owners.erase(it);
      }
      ASSERT_EQ(pool.free() + static_cast<int64_t>(owners.size()), pool.blocks());
      for (const auto& [block, count] : owners) ASSERT_EQ(pool.owners(block), count);
    }
  }
}

TEST(BlockPoolDeathTest, RefusesWhatOnlyAMistakeOfOursCanAsk) {
  BlockPool pool(1);
  EXPECT_DEATH(pool.release(0), "free already");
  EXPECT_DEATH(pool.share(0), "cannot be shared");
  pool.take();
  EXPECT_DEATH(pool.take(), "no block is free");
}

}  // namespace
}  // namespace leeway
