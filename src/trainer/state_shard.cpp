#include "trainer/state_shard.h"

#include <algorithm>

#include "base/bytes.h"

namespace leeway {

std::vector<StatePiece> pieces_between(const std::vector<ParameterInfo>& table,
                                       std::span<const size_t> offsets, size_t begin, size_t end) {
  std::vector<StatePiece> pieces;
  for (size_t i = 0; i < table.size(); ++i) {
    const size_t first = std::max(offsets[i], begin);
    const size_t last = std::min(offsets[i] + static_cast<size_t>(table[i].size()), end);
    if (first < last) pieces.push_back({i, first - offsets[i], last - first});
  }
  return pieces;
}

void collect_moments(Ranks& ranks, const StateShard& shard, AdamW* all) {
  if (all == nullptr) {
    std::vector<float> numbers;
    for (const StateKind which : kMoments) {
      for (const StatePiece& piece : shard.pieces(ranks.rank())) {
        numbers.resize(piece.count);
        shard.read(which, piece, numbers);
        ByteWriter message;
        message.put(std::span<const float>(numbers));
        ranks.send(0, Channel::training, message.take());
      }
    }
    return;
  }
  for (int r = 0; r < ranks.size(); ++r) {
    for (const StateKind which : kMoments) {
      Parameters& into =
          which == StateKind::first_moment ? all->first_moment() : all->second_moment();
      for (const StatePiece& piece : shard.pieces(r)) {
        const std::span<float> to = into.of(piece.parameter).subspan(piece.first, piece.count);
        if (r == 0) {
          shard.read(which, piece, to);
          continue;
        }
        const std::string message = ranks.receive(r, Channel::training);
        ByteReader reader(message);
        reader.get_list(to);
        reader.end();
      }
    }
  }
}

}  // namespace leeway
