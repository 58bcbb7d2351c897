// The sum over ranks in one fixed order, which every implementation of Ranks gives.
#pragma once

#include <span>

namespace leeway {

// out[i] = sum over r of terms[r][i], added in a binary tree over the positions: (0 + 1) + (2 + 3),
// with 5 terms ((0 + 1) + (2 + 3)) + 4. A null term is left out: its neighbour takes the place of
// their sum and the positions of the others stay, so that a tree over slots has the same bits
// however many of its lower levels were summed before. False if all terms are null; `out` is
// unchanged then. Terms are as long as `out`; `out` may be one of them.
bool tree_sum(std::span<const float* const> terms, std::span<float> out);

}  // namespace leeway
