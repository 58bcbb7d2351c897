// A rank's part of weights and moments on its device, as numbers of parameters on the host. Of
// float32 weights in two halves a piece at a time is joined on the device.
#pragma once

#include <functional>
#include <vector>

#include "torch/flat_adamw.h"
#include "torch/flat_layout.h"
#include "trainer/state_shard.h"

namespace leeway {

class TorchStateShard : public StateShard {
 public:
  // `own` gives weights and moments of part `rank` of `ranks`, as the optimizer's step has them;
  // both must outlive it.
  TorchStateShard(const FlatLayout& layout, int rank, int ranks, std::function<FlatAdamW()> own);

  StateModel model() const override {
    return {layout_.config, layout_.lora ? &*layout_.lora : nullptr, layout_.table};
  }
  std::vector<StatePiece> pieces(int rank) const override;
  void read(StateKind kind, const StatePiece& piece, std::span<float> to) const override;
  std::function<void()> prepare(const ReadState& read) override;

 private:
  // Of the part's first number.
  int64_t place_of(const StatePiece& piece) const;

  const FlatLayout& layout_;
  const std::vector<size_t> offsets_;
  const int rank_, ranks_;
  const std::function<FlatAdamW()> own_;
};

}  // namespace leeway
