// Sequences that lie one after the other in a batch, without padding.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <span>
#include <vector>

#include "model/model_config.h"
#include "torch/length_groups.h"

namespace leeway {

struct PackedSequences {
  // Sequence s consists of tokens cu_seqlens[s] .. cu_seqlens[s+1]. Throws Error if these do not
  // increase from 0 to `tokens`, or if a sequence is longer than the model allows.
  PackedSequences(const ModelConfig& config, std::span<const int64_t> cu_seqlens, int64_t tokens,
                  at::Device device);

  std::vector<int64_t> lengths;
  int64_t longest = 0;
  at::Tensor offsets;    // int32 [sequences + 1], cu_seqlens on the device
  at::Tensor positions;  // int32 [tokens], each in its sequence, on the device
  // int32 [T, 2], {first row, rows}: consecutive rows of one sequence, at most kAttentionTileRows;
  // those with the last positions first.
  at::Tensor tiles;
  at::Tensor longest_first;  // int32 [2, sequences]: first rows and lengths, the longest first
  at::Tensor counters;       // int32 [2], zeros that attention counts in on the device

  // The same padded to groups of one length; its integers on the device, int32.
  std::vector<LengthGroups::Group> groups;
  at::Tensor padded_rows, padded_places;  // undefined where there is one group without padding
};

}  // namespace leeway
