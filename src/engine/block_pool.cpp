#include "engine/block_pool.h"

#include <fmt/format.h>

#include "leeway/error.h"

namespace leeway {

BlockPool::BlockPool(int64_t blocks) : owners_(static_cast<size_t>(blocks), 0) {
  free_.reserve(owners_.size());
  for (int64_t block = blocks; block-- > 0;) free_.push_back(static_cast<int32_t>(block));
}

int32_t BlockPool::take() {
  LEEWAY_CHECK(!free_.empty(), "no block is free");
  const int32_t block = free_.back();
  free_.pop_back();
  owners_[block] = 1;
  return block;
}

void BlockPool::share(int32_t block) {
  LEEWAY_CHECK(owners_.at(block) > 0, fmt::format("block {} is free and cannot be shared", block));
  ++owners_[block];
}

void BlockPool::release(int32_t block) {
  LEEWAY_CHECK(owners_.at(block) > 0, fmt::format("block {} is free already", block));
  if (--owners_[block] == 0) free_.push_back(block);
}

}  // namespace leeway
