// Which sequences share a forward and backward pass.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace leeway {

// Packs items of the given sizes into as few bins of at most `budget` as first-fit decreasing
// finds, then distributes them over that many bins so that the largest is as small as longest-first
// finds (never above the first packing's). An item larger than the budget gets its own bin. Items
// of size 0 are omitted. Each bin lists item indices in ascending order; bins are ordered by their
// first item. Depends on the sizes alone.
std::vector<std::vector<size_t>> pack(std::span<const int64_t> sizes, int64_t budget);

}  // namespace leeway
