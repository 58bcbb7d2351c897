// How a batch is cut for its optimizer steps.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "data/sample.h"

namespace leeway {

// Sample numbers in `count` parts of nearly as many rollouts each, rollouts kept whole; parts that
// would be empty are left out. One part holds everything in order; several are drawn by `seed`, so
// that the rollouts of a group, which lie side by side, come into different ones.
std::vector<std::vector<size_t>> split_minibatches(std::span<const Sample> samples, int64_t count,
                                                   uint64_t seed);

}  // namespace leeway
