#include "torch/length_groups.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <map>

namespace leeway {
namespace {

constexpr int64_t kLeast = 128;

int64_t padded_length(int64_t length) {
  const auto power = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(length)));
  const int64_t step = std::max(kLeast, power / 8);
  return (length + step - 1) / step * step;
}

}  // namespace

LengthGroups group_lengths(std::span<const int64_t> lengths) {
  LengthGroups out;
  const bool one_length =
      std::ranges::adjacent_find(lengths, std::ranges::not_equal_to()) == lengths.end();
  std::vector<int64_t> starts;
  std::map<int64_t, std::vector<size_t>> of_length;
  int64_t packed = 0;
  for (size_t s = 0; s < lengths.size(); ++s) {
    starts.push_back(packed);
    packed += lengths[s];
    of_length[one_length ? lengths[s] : padded_length(lengths[s])].push_back(s);
  }
  out.places.resize(static_cast<size_t>(packed));
  for (const auto& [length, members] : of_length) {
    for (size_t first = 0; first < members.size();) {
      const size_t left = members.size() - first;
      const size_t count = one_length ? left : std::bit_floor(left);
      const auto first_row = static_cast<int64_t>(out.rows.size());
      out.groups.push_back({first_row, static_cast<int64_t>(count), length});
      out.rows.resize(out.rows.size() + count * static_cast<size_t>(length), -1);
      for (size_t i = 0; i < count; ++i) {
        const size_t s = members[first + i];
        const int64_t padded = first_row + static_cast<int64_t>(i) * length;
        for (int64_t t = 0; t < lengths[s]; ++t) {
          out.rows[static_cast<size_t>(padded + t)] = static_cast<int32_t>(starts[s] + t);
          out.places[static_cast<size_t>(starts[s] + t)] = static_cast<int32_t>(padded + t);
        }
      }
      first += count;
    }
  }
  return out;
}

}  // namespace leeway
