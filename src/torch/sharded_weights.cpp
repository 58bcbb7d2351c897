#include "torch/sharded_weights.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

#include "leeway/error.h"

namespace leeway {

using at::Tensor;

ShardedWeights::ShardedWeights(FlatLayout layout, at::Device device, at::ScalarType compute,
                               DeviceGroup& group)
    : layout_(std::move(layout)), ranges_(network_ranges(layout_)), group_(group), side_(device) {
  const at::TensorOptions numbers = at::TensorOptions(device).dtype(compute);
  own_ = at::zeros({layout_.part_of(group.rank(), group.size()).count}, numbers);
  rest_ = at::zeros({layout_.size - layout_.decaying}, numbers);
  for (Place& place : places_) {
    const bool of_layers = &place != &places_.back();
    const FlatRange range = of_layers ? ranges_.layers.at(0) : ranges_.embedding;
    place.weights = at::zeros({range.count}, numbers);
  }
  network_ = views(&Place::weights, rest_);
}

int64_t ShardedWeights::named(int64_t piece) const {
  return piece == kHeadPiece && is_tied() ? kEmbeddingPiece : piece;
}

FlatRange ShardedWeights::range_of(int64_t piece) const {
  if (piece == kEmbeddingPiece) return ranges_.embedding;
  return piece == kHeadPiece ? ranges_.head : ranges_.layers[static_cast<size_t>(piece)];
}

// Neighbours are in different places in either direction.
ShardedWeights::Place& ShardedWeights::place_of(int64_t piece) {
  return piece < 0 ? places_.back() : places_[static_cast<size_t>(piece % 2)];
}

NetworkTensors ShardedWeights::views(Tensor Place::*numbers, const Tensor& rest) {
  return network_views(layout_, [&](int64_t offset, int64_t count) {
    if (offset >= layout_.decaying) return rest.narrow(0, offset - layout_.decaying, count);
    int64_t piece = kEmbeddingPiece;
    if (offset == ranges_.head.begin) piece = named(kHeadPiece);
    for (size_t i = 0; i < ranges_.layers.size(); ++i) {
      const auto& [begin, size] = ranges_.layers[i];
      if (offset >= begin && offset < begin + size) piece = static_cast<int64_t>(i);
    }
    return (place_of(piece).*numbers).narrow(0, offset - range_of(piece).begin, count);
  });
}

NetworkTensors ShardedWeights::use_gradients(const Tensor& own) {
  LEEWAY_CHECK(own.numel() == own_.numel(), "the gradients of a rank's part");
  own_gradients_ = own;
  if (!rest_gradients_.defined()) {
    rest_gradients_ = at::zeros_like(rest_, rest_.options().dtype(at::kFloat));
    for (Place& place : places_) {
      place.gradients = at::zeros_like(place.weights, rest_gradients_.options());
    }
  }
  return views(&Place::gradients, rest_gradients_);
}

ShardedWeights::OwnNumbers ShardedWeights::own_of(const FlatRange& range) const {
  const FlatRange part = layout_.part_of(group_.rank(), group_.size());
  const int64_t begin = std::max(part.begin, range.begin);
  const int64_t end = std::min(part.begin + part.count, range.begin + range.count);
  return {begin - range.begin, begin - part.begin, std::max<int64_t>(0, end - begin)};
}

void ShardedWeights::gather(const FlatRange& range, const Tensor& numbers) {
  const at::NoGradGuard guard;
  if (const OwnNumbers own = own_of(range); own.count > 0) {
    numbers.narrow(0, own.in_range, own.count).copy_(own_.narrow(0, own.in_part, own.count));
  }
  group_.gather_parts(numbers, layout_.bounds_of(range, group_.size()));
}

void ShardedWeights::sum(const FlatRange& range, const Tensor& gradients) {
  const at::NoGradGuard guard;
  group_.reduce_parts(gradients, layout_.bounds_of(range, group_.size()));
  if (const OwnNumbers own = own_of(range); own.count > 0) {
    own_gradients_.narrow(0, own.in_part, own.count)
        .add_(gradients.narrow(0, own.in_range, own.count));
  }
}

// Begins when what the current stream has by now has ended: the piece that is in its place is not
// read any more.
void ShardedWeights::bring(int64_t piece) {
  Place& place = place_of(piece);
  if (place.held == piece) return;
  place.held = kNothing;
  const FlatRange range = range_of(piece);
  place.arrived = side_.run([&] { gather(range, place.weights.narrow(0, 0, range.count)); });
  place.held = piece;
}

void ShardedWeights::read(int64_t piece) {
  bring(piece);
  side_.wait(place_of(piece).arrived);
  const auto reads = [](const Act& act) {
    return act.act == PieceAct::read || act.act == PieceAct::work;
  };
  const auto following =
      std::find_if(acts_.begin() + static_cast<std::ptrdiff_t>(next_), acts_.end(), reads);
  if (following != acts_.end()) bring(following->piece);
}

void ShardedWeights::give(int64_t piece) {
  Place& place = place_of(piece);
  const FlatRange range = range_of(piece);
  place.given = side_.run([&] { sum(range, place.gradients.narrow(0, 0, range.count)); });
}

void ShardedWeights::begin(bool trains) {
  LEEWAY_CHECK(!trains || own_gradients_.defined(), "gradients of a pass that trains");
  const auto layers = static_cast<int64_t>(ranges_.layers.size());
  acts_.clear(), next_ = 0;
  acts_.push_back({PieceAct::read, kEmbeddingPiece});
  for (int64_t i = 0; i < layers; ++i) acts_.push_back({PieceAct::read, i});
  acts_.push_back({trains ? PieceAct::work : PieceAct::read, named(kHeadPiece)});
  if (!trains) return;
  if (!is_tied()) acts_.push_back({PieceAct::give, kHeadPiece});
  for (int64_t i = layers; i-- > 0;) {
    acts_.push_back({PieceAct::work, i});
    acts_.push_back({PieceAct::give, i});
  }
  acts_.push_back({PieceAct::write, kEmbeddingPiece});
  acts_.push_back({PieceAct::give, kEmbeddingPiece});
}

void ShardedWeights::at(PieceAct act, int64_t piece) {
  // The gradient of a tied head is complete when the embedding's is.
  if (is_tied() && piece == kHeadPiece && act == PieceAct::give) return;
  const Act now{act, named(piece)};
  LEEWAY_CHECK(next_ < acts_.size() && acts_[next_] == now, "a pass in its order");
  ++next_;
  perform(now, true);
}

void ShardedWeights::perform(const Act& act, bool computes) {
  const int64_t piece = act.piece;
  Place& place = place_of(piece);
  switch (act.act) {
    case PieceAct::read: return read(piece);
    case PieceAct::work:
      read(piece);
      side_.wait(place.given);
      if (!computes) place.gradients.zero_();
      return;
    case PieceAct::write:
      side_.wait(place.given);
      if (!is_tied()) place.gradients.zero_();
      return;
    case PieceAct::give: return give(piece);
  }
}

void ShardedWeights::finish() {
  while (next_ < acts_.size()) {
    const Act now = acts_[next_++];
    perform(now, false);
  }
}

void ShardedWeights::sum_rest() {
  const FlatRange range{layout_.decaying, layout_.size - layout_.decaying};
  side_.wait(side_.run([&] { sum(range, rest_gradients_); }));
}

void ShardedWeights::weights_changed() {
  for (Place& place : places_) place.held = kNothing;
}

void ShardedWeights::hand_out_rest() {
  const FlatRange range{layout_.decaying, layout_.size - layout_.decaying};
  side_.wait(side_.run([&] { gather(range, rest_); }));
}

void ShardedWeights::read_all(const std::function<void(int64_t, const Tensor&)>& each) {
  begin(false);
  while (next_ < acts_.size()) {
    const int64_t piece = acts_[next_].piece;
    const bool again = next_ > 0 && piece == kEmbeddingPiece;  // a tied head
    at(PieceAct::read, piece);
    const FlatRange range = range_of(piece);
    if (!again) each(range.begin, place_of(piece).weights.narrow(0, 0, range.count));
  }
  each(layout_.decaying, rest_);
}

}  // namespace leeway
