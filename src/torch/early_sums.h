// Sums of whole gradients over ranks while the pass that completes them goes on: those of a piece
// begin when it is complete, beside the computation of the next. A rank's part of the layout has
// the sum afterwards, the rest is unspecified.
//
// All ranks sum the same pieces in the same order, from the head to the embedding; what the passes
// of a rank do not complete, `finish` sums as it is. One thread at a time.
#pragma once

#include <ATen/ATen.h>

#include <vector>

#include "torch/device_group.h"
#include "torch/flat_layout.h"
#include "torch/pass_pieces.h"
#include "torch/side_stream.h"

namespace leeway {

class EarlySums final : public PassPieces {
 public:
  // `gradients` [layout.size], float32; `group` must outlive it.
  EarlySums(const FlatLayout& layout, at::Tensor gradients, DeviceGroup& group);

  // Gradients are complete when a pass says so from here on.
  void begin() { next_ = 0; }
  void at(PieceAct act, int64_t piece) override;
  // The rest of the sums; all are there for the current stream then.
  void finish();

 private:
  struct Piece {
    int64_t number;
    FlatRange range;
    std::vector<int64_t> bounds;
  };
  void sum(const Piece& piece);

  const at::Tensor gradients_;
  DeviceGroup& group_;
  std::vector<Piece> pieces_;  // in the order of their sums
  size_t next_ = 0;
  SideStream::Mark last_;
  SideStream side_;
};

}  // namespace leeway
