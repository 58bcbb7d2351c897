// Which blocks of the KV cache are in use, and by how many samples.
//
// The block freed last is handed out first: its memory is the most likely to be in a cache.
#pragma once

#include <cstdint>
#include <vector>

namespace leeway {

class BlockPool {
 public:
  explicit BlockPool(int64_t blocks);

  int64_t blocks() const { return static_cast<int64_t>(owners_.size()); }
  int64_t free() const { return static_cast<int64_t>(free_.size()); }

  // Takes a free block, with one owner. There must be one.
  int32_t take();
  // Adds an owner.
  void share(int32_t block);
  // Removes an owner; the last one frees the block.
  void release(int32_t block);
  int32_t owners(int32_t block) const { return owners_[block]; }

 private:
  std::vector<int32_t> owners_;  // [blocks]
  std::vector<int32_t> free_;    // the next one last
};

}  // namespace leeway
