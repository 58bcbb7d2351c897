// How a batch is split for its optimizer steps.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "data/sample.h"

namespace leeway {

// Sample indices in `count` minibatches with nearly equal numbers of rollouts, keeping rollouts
// whole; empty ones are omitted. A single minibatch contains everything in order; several are drawn
// by `seed`, so that the rollouts of a group, which are adjacent, are spread over them.
std::vector<std::vector<size_t>> split_minibatches(std::span<const Sample> samples, int64_t count,
                                                   uint64_t seed);

}  // namespace leeway
