#include "torch/early_sums.h"

#include <utility>

#include "leeway/error.h"

namespace leeway {

EarlySums::EarlySums(const FlatLayout& layout, at::Tensor gradients, DeviceGroup& group)
    : gradients_(std::move(gradients)), group_(group), side_(gradients_.device()) {
  LEEWAY_CHECK(gradients_.numel() == layout.size, "gradients in the layout");
  const auto add = [&](int64_t number, const FlatRange& range) {
    pieces_.push_back({number, range, layout.bounds_of(range, group.size())});
  };
  const NetworkRanges ranges = network_ranges(layout);
  if (!layout.config.tie_word_embeddings) add(kHeadPiece, ranges.head);
  for (size_t i = ranges.layers.size(); i-- > 0;) {
    add(static_cast<int64_t>(i), ranges.layers[i]);
  }
  add(kEmbeddingPiece, ranges.embedding);
  constexpr int64_t kRest = -3;  // norms and biases
  add(kRest, {layout.decaying, layout.size - layout.decaying});
}

void EarlySums::sum(const Piece& piece) {
  last_ = side_.run([&] {
    group_.reduce_parts(gradients_.narrow(0, piece.range.begin, piece.range.count), piece.bounds);
  });
}

// A tied head is complete when the embedding is.
void EarlySums::at(PieceAct act, int64_t piece) {
  if (act != PieceAct::give || pieces_[next_].number != piece) return;
  sum(pieces_[next_++]);
}

void EarlySums::finish() {
  while (next_ < pieces_.size()) sum(pieces_[next_++]);
  side_.wait(last_);
}

}  // namespace leeway
