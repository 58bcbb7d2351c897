// How blocks of threads divide the tiles of an attention call: what they compute is cut into items,
// and each block finds its next one while it still copies for the one before.
#pragma once

#include <cstdint>

#include "cuda/attention.h"
#include "cuda/device_math.cuh"

namespace leeway::cuda {

// Consecutive rows of a sequence, for one query head or for several that share their keys.
struct Item {
  int first_row, rows;  // no rows: there are no more items
  int position;         // of the first row
  int head;             // the first
};

// The items of a call: tiles in parts of `part_rows`, times the query heads in units of
// `heads_at_once`. Those of `section` units come first, so that the keys and values that are read
// at a time stay in the cache; among them the longest come first, as in the list of tiles.
struct Items {
  int tiles, parts, part_rows, units, heads_at_once, section;

  __host__ __device__ int count() const { return tiles * parts * units; }
};

// One thread's search for its block's items. Each step waits for memory that the one before has
// asked for.
class ItemSearch {
 public:
  __device__ __forceinline__ ItemSearch(const Attention& attention, const AttentionTile* tiles,
                                        const Items& items)
      : attention_(attention), tiles_(tiles), items_(items) {}

  __device__ __forceinline__ void begin() { next_ = Step::index; }
  __device__ __forceinline__ bool found() const { return next_ == Step::found; }
  __device__ __forceinline__ const Item& item() const { return item_; }
  __device__ __forceinline__ void advance() {
    switch (next_) {
      case Step::index: take_index(); return;
      case Step::tile: read_tile(); return;
      case Step::position: read_position(); return;
      case Step::found: return;
    }
  }

 private:
  enum class Step { index, tile, position, found };

  __device__ __forceinline__ void take_index() {
    if (attention_.counters != nullptr) {
      index_ = atomicAdd(attention_.counters, 1);
    } else {
      // Every other round is taken backwards: who has the longest of one has the shortest of the
      // next.
      const int blocks = gridDim.x, block = blockIdx.x;
      index_ = round_ * blocks + (round_ % 2 == 0 ? block : blocks - 1 - block);
      ++round_;
    }
    next_ = Step::tile;
  }
  __device__ __forceinline__ void read_tile() {
    if (index_ >= items_.count()) {
      const bool more =
          attention_.counters == nullptr && round_ * static_cast<int>(gridDim.x) < items_.count();
      item_.rows = 0;
      next_ = more ? Step::index : Step::found;
      return;
    }
    const int of_section = items_.tiles * items_.parts * items_.section;
    const int section = index_ / of_section, rest = index_ % of_section;
    const int width = min(items_.section, items_.units - section * items_.section);
    const int part = rest / width;
    part_ = items_.parts - 1 - part % items_.parts;  // the last sees most
    item_.head = (section * items_.section + rest % width) * items_.heads_at_once;
    tile_ = tiles_[part / items_.parts];
    next_ = Step::position;
  }
  __device__ __forceinline__ void read_position() {
    const int offset = part_ * items_.part_rows;
    item_.first_row = tile_.first_row + offset;
    item_.rows = min(tile_.rows - offset, items_.part_rows);
    if (item_.rows <= 0) return begin();
    item_.position = attention_.places.positions[tile_.first_row] + offset;
    next_ = Step::found;
  }

  const Attention& attention_;
  const AttentionTile* tiles_;
  const Items& items_;
  Step next_ = Step::index;
  int round_ = 0, index_, part_;
  AttentionTile tile_;
  Item item_;
};

// The last block to call this leaves the counters as they were. One thread of each calls it, when
// it has found that there are no more items.
__device__ __forceinline__ void end_search(const Attention& attention) {
  if (attention.counters == nullptr) return;
  __threadfence();
  if (atomicAdd(attention.counters + 1, 1) == static_cast<int>(gridDim.x) - 1) {
    attention.counters[0] = attention.counters[1] = 0;
  }
}

}  // namespace leeway::cuda
