#include "torch/packed_sequences.h"

#include <algorithm>
#include <array>
#include <functional>
#include <string>
#include <utility>

#include "kernels/kv_block.h"
#include "leeway/error.h"

namespace leeway {

namespace {

void check_cu_seqlens(const ModelConfig& config, std::span<const int64_t> cu_seqlens,
                      int64_t tokens) {
  if (cu_seqlens.size() < 2 || cu_seqlens.front() != 0 || cu_seqlens.back() != tokens) {
    throw Error("cu_seqlens: must run from 0 to the number of tokens, " + std::to_string(tokens));
  }
  for (size_t s = 0; s + 1 < cu_seqlens.size(); ++s) {
    const int64_t length = cu_seqlens[s + 1] - cu_seqlens[s];
    const std::string where =
        "cu_seqlens: sequence " + std::to_string(s) + " has " + std::to_string(length) + " tokens";
    if (length < 1) throw Error(where + "; every sequence needs at least one");
    if (length > config.max_position_embeddings) {
      throw Error(where + ", the model takes at most max_position_embeddings = " +
                  std::to_string(config.max_position_embeddings) + "; cut it or leave it out");
    }
  }
}

at::Tensor on_device(const std::vector<int32_t>& numbers, at::Device device) {
  return at::from_blob(const_cast<int32_t*>(numbers.data()), {static_cast<int64_t>(numbers.size())},
                       at::kInt)
      .to(device, at::kInt, /*non_blocking=*/false, /*copy=*/true);
}

std::vector<int32_t> tiles_of(std::span<const int64_t> cu_seqlens) {
  std::vector<std::array<int64_t, 3>> tiles;  // last position, first row, rows
  for (size_t s = 0; s + 1 < cu_seqlens.size(); ++s) {
    for (int64_t row = cu_seqlens[s]; row < cu_seqlens[s + 1]; row += kAttentionTileRows) {
      const int64_t rows = std::min(kAttentionTileRows, cu_seqlens[s + 1] - row);
      tiles.push_back({row - cu_seqlens[s] + rows - 1, row, rows});
    }
  }
  std::ranges::sort(tiles, std::ranges::greater());
  std::vector<int32_t> numbers;
  for (const auto& [last, row, rows] : tiles) {
    numbers.push_back(static_cast<int32_t>(row));
    numbers.push_back(static_cast<int32_t>(rows));
  }
  return numbers;
}

}  // namespace

PackedSequences::PackedSequences(const ModelConfig& config, std::span<const int64_t> cu_seqlens,
                                 int64_t tokens, at::Device device) {
  check_cu_seqlens(config, cu_seqlens, tokens);
  std::vector<int32_t> places;
  for (size_t s = 0; s + 1 < cu_seqlens.size(); ++s) {
    const int64_t length = cu_seqlens[s + 1] - cu_seqlens[s];
    lengths.push_back(length);
    longest = std::max(longest, length);
    for (int64_t t = 0; t < length; ++t) places.push_back(static_cast<int32_t>(t));
  }
  tiles = on_device(tiles_of(cu_seqlens), device).view({-1, 2});
  counters = at::zeros({2}, at::TensorOptions(at::kInt).device(device));
  offsets = on_device({cu_seqlens.begin(), cu_seqlens.end()}, device);
  positions = on_device(places, device);
  LengthGroups padded = group_lengths(lengths);
  groups = std::move(padded.groups);
  if (groups.size() == 1 && padded.rows.size() == padded.places.size()) return;
  padded_rows = on_device(padded.rows, device);
  padded_places = on_device(padded.places, device);
}

}  // namespace leeway
