// A rank's part of the optimizer's moments on its device, as numbers of parameters on the host.
#pragma once

#include <functional>
#include <vector>

#include "torch/flat_layout.h"
#include "torch/flat_moments.h"
#include "trainer/moment_shard.h"

namespace leeway {

class TorchMomentShard : public MomentShard {
 public:
  // `moments` gives those of part `rank` of `ranks`; both must outlive it.
  TorchMomentShard(const FlatLayout& layout, int rank, int ranks,
                   std::function<const FlatMoments&()> moments);

  const std::vector<ParameterInfo>& table() const override { return layout_.table; }
  std::vector<MomentPiece> pieces(int rank) const override;
  void read(Moment which, const MomentPiece& piece, std::span<float> to) const override;
  std::function<void()> prepare(const ReadMoment& read) override;

 private:
  // Of the part's first number.
  int64_t place_of(const MomentPiece& piece) const;

  const FlatLayout& layout_;
  const std::vector<size_t> offsets_;
  const int rank_, ranks_;
  const std::function<const FlatMoments&()> moments_;
};

}  // namespace leeway
