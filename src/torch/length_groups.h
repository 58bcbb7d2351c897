// Packed sequences of different lengths as a few groups that are padded to a common length: for
// kernels that take sequences of one length.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace leeway {

struct LengthGroups {
  struct Group {
    int64_t first_row;          // among the padded rows
    int64_t sequences, length;  // padded rows each
  };
  std::vector<Group> groups;
  std::vector<int32_t> rows;    // [padded rows]: the packed row of each, -1: padding
  std::vector<int32_t> places;  // [packed rows]: the padded row of each
};

// Sequences of one length are one group without padding. Others are padded to few different lengths
// (an eighth too long at most, or to a multiple of 128), and a group has a power of two of them, so
// that few different shapes come up in a run.
LengthGroups group_lengths(std::span<const int64_t> lengths);

}  // namespace leeway
