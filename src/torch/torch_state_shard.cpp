#include "torch/torch_state_shard.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <memory>
#include <utility>

#include "cuda/moment_codes.h"
#include "torch/split_masters.h"
#include "torch/torch_errors.h"

namespace leeway {

using at::Tensor;

namespace {

Tensor host_view(std::span<float> numbers) {
  return at::from_blob(numbers.data(), {static_cast<int64_t>(numbers.size())}, at::kFloat);
}

// Calls each(begin, count) for numbers that are float32 on the device at a time, whole blocks of
// codes.
template <class Each>
void for_chunks(int64_t size, Each&& each) {
  constexpr int64_t kChunk = int64_t{1} << 26;
  for (int64_t begin = 0; begin < size; begin += kChunk)
    each(begin, std::min(kChunk, size - begin));
}

void read_weights(const FlatAdamW& own, int64_t begin, const Tensor& to) {
  for_chunks(to.numel(), [&](int64_t at, int64_t count) {
    const bool is_split = own.low.defined();
    to.narrow(0, at, count)
        .copy_(is_split ? joined(SplitMasters{own.copy, own.low}.part(begin + at, count))
                        : own.parameters.narrow(0, begin + at, count));
  });
}

void write_weights(const Tensor& from, const FlatAdamW& own) {
  for_chunks(from.numel(), [&](int64_t begin, int64_t count) {
    const Tensor numbers = from.narrow(0, begin, count);
    if (own.low.defined()) {
      split(numbers.to(own.low.device()), SplitMasters{own.copy, own.low}.part(begin, count));
      return;
    }
    own.parameters.narrow(0, begin, count).copy_(numbers);
    if (own.copy.defined()) own.copy.narrow(0, begin, count).copy_(numbers);
  });
}

void read_moments(const FlatMoments& moments, bool is_first, int64_t begin, const Tensor& to) {
  const int64_t coded = moments.coded(), count = to.numel();
  // A parameter has codes or none.
  if (begin >= coded) {
    to.copy_((is_first ? moments.first : moments.second).narrow(0, begin - coded, count));
    return;
  }
  const int64_t block = begin / cuda::kMomentBlock * cuda::kMomentBlock;
  const auto [first, second] = decoded(moments, block, begin + count - block);
  to.copy_((is_first ? first : second).narrow(0, begin - block, count));
}

void write_moments(const Tensor& first, const Tensor& second, const FlatMoments& moments) {
  const int64_t coded = moments.coded();
  const at::Device device = moments.first.device();
  for_chunks(coded, [&](int64_t begin, int64_t count) {
    encode(first.narrow(0, begin, count).to(device), second.narrow(0, begin, count).to(device),
           begin, moments);
  });
  moments.first.copy_(first.narrow(0, coded, moments.first.numel()));
  moments.second.copy_(second.narrow(0, coded, moments.second.numel()));
}

}  // namespace

TorchStateShard::TorchStateShard(const FlatLayout& layout, int rank, int ranks,
                                 std::function<FlatAdamW()> own)
    : layout_(layout),
      offsets_(layout.offsets.begin(), layout.offsets.end()),
      rank_(rank),
      ranks_(ranks),
      own_(std::move(own)) {}

std::vector<StatePiece> TorchStateShard::pieces(int rank) const {
  const FlatRange range = layout_.part_of(rank, ranks_);
  return pieces_between(layout_.table, offsets_, static_cast<size_t>(range.begin),
                        static_cast<size_t>(range.begin + range.count));
}

int64_t TorchStateShard::place_of(const StatePiece& piece) const {
  return layout_.offsets[piece.parameter] + static_cast<int64_t>(piece.first) -
         layout_.part_of(rank_, ranks_).begin;
}

void TorchStateShard::read(StateKind kind, const StatePiece& piece, std::span<float> to) const {
  const at::NoGradGuard guard;
  with_plain_errors([&] {
    const FlatAdamW own = own_();
    if (kind == StateKind::weight) return read_weights(own, place_of(piece), host_view(to));
    read_moments(own.moments, kind == StateKind::first_moment, place_of(piece), host_view(to));
  });
}

// Codes of a block need all of its numbers, so that those of the part come together on the host.
std::function<void()> TorchStateShard::prepare(const ReadState& read) {
  const auto size = static_cast<size_t>(layout_.part_of(rank_, ranks_).count);
  auto numbers = std::make_shared<std::array<std::vector<float>, std::size(kStateKinds)>>();
  for (const StateKind kind : kStateKinds) {
    std::vector<float>& all = (*numbers)[static_cast<size_t>(kind)];
    all.resize(size);
    for (const StatePiece& piece : pieces(rank_)) {
      read(kind, piece, std::span(all).subspan(static_cast<size_t>(place_of(piece)), piece.count));
    }
  }
  return [this, numbers] {
    const at::NoGradGuard guard;
    with_plain_errors([&] {
      const FlatAdamW own = own_();
      auto& [weights, first, second] = *numbers;
      write_weights(host_view(weights), own);
      write_moments(host_view(first), host_view(second), own.moments);
    });
  };
}

}  // namespace leeway
