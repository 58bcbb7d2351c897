#include "torch/torch_moment_shard.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <array>
#include <memory>
#include <utility>

#include "cuda/moment_codes.h"

namespace leeway {

using at::Tensor;

namespace {

Tensor host_view(std::span<float> numbers) {
  return at::from_blob(numbers.data(), {static_cast<int64_t>(numbers.size())}, at::kFloat);
}

}  // namespace

TorchMomentShard::TorchMomentShard(const FlatLayout& layout, int rank, int ranks,
                                   std::function<const FlatMoments&()> moments)
    : layout_(layout),
      offsets_(layout.offsets.begin(), layout.offsets.end()),
      rank_(rank),
      ranks_(ranks),
      moments_(std::move(moments)) {}

std::vector<MomentPiece> TorchMomentShard::pieces(int rank) const {
  const FlatRange range = layout_.part_of(rank, ranks_);
  return pieces_between(layout_.table, offsets_, static_cast<size_t>(range.begin),
                        static_cast<size_t>(range.begin + range.count));
}

int64_t TorchMomentShard::place_of(const MomentPiece& piece) const {
  return layout_.offsets[piece.parameter] + static_cast<int64_t>(piece.first) -
         layout_.part_of(rank_, ranks_).begin;
}

void TorchMomentShard::read(Moment which, const MomentPiece& piece, std::span<float> to) const {
  const at::NoGradGuard guard;
  const FlatMoments& moments = moments_();
  const int64_t begin = place_of(piece), end = begin + static_cast<int64_t>(piece.count);
  const int64_t coded = moments.coded();
  const bool is_first = which == Moment::first;
  // A parameter has codes or none.
  if (begin >= coded) {
    const Tensor& numbers = is_first ? moments.first : moments.second;
    host_view(to).copy_(numbers.narrow(0, begin - coded, end - begin));
    return;
  }
  const int64_t block = begin / cuda::kMomentBlock * cuda::kMomentBlock;
  const auto [first, second] = decoded(moments, block, end - block);
  host_view(to).copy_((is_first ? first : second).narrow(0, begin - block, end - begin));
}

// Codes of a block need all of its numbers, so that those of the part come together on the host.
std::function<void()> TorchMomentShard::prepare(const ReadMoment& read) {
  const FlatRange own = layout_.part_of(rank_, ranks_);
  auto numbers = std::make_shared<std::array<std::vector<float>, 2>>();
  for (const Moment which : kMoments) {
    std::vector<float>& all = (*numbers)[static_cast<size_t>(which)];
    all.resize(static_cast<size_t>(own.count));
    for (const MomentPiece& piece : pieces(rank_)) {
      read(which, piece, std::span(all).subspan(static_cast<size_t>(place_of(piece)), piece.count));
    }
  }
  return [this, numbers] {
    const at::NoGradGuard guard;
    const FlatMoments& moments = moments_();
    const Tensor first = host_view((*numbers)[0]), second = host_view((*numbers)[1]);
    constexpr int64_t kPart = int64_t{1} << 26;  // numbers that are float32 at a time, whole blocks
    const int64_t coded = moments.coded();
    for (int64_t begin = 0; begin < coded; begin += kPart) {
      const int64_t count = std::min(kPart, coded - begin);
      const at::Device device = moments.first.device();
      encode(first.narrow(0, begin, count).to(device), second.narrow(0, begin, count).to(device),
             begin, moments);
    }
    moments.first.copy_(first.narrow(0, coded, moments.first.numel()));
    moments.second.copy_(second.narrow(0, coded, moments.second.numel()));
  };
}

}  // namespace leeway
