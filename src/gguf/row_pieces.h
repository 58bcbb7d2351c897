// A matrix in pieces of whole rows, so that none of it but a piece is in memory.
#pragma once

#include <algorithm>
#include <cstdint>

namespace leeway {

// use(first, count) for consecutive pieces of `rows` rows; each has a multiple of `together` rows,
// which divides their number.
template <class Use>
void for_each_piece(int64_t rows, int64_t row_length, int64_t together, Use use) {
  constexpr int64_t kMostNumbers = 1 << 22;
  const int64_t fitting = kMostNumbers / row_length / together * together;
  const int64_t step = std::max(fitting, together);
  for (int64_t first = 0; first < rows; first += step) use(first, std::min(step, rows - first));
}

}  // namespace leeway
