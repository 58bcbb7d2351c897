// The weights of a network of which each rank has a part (ZeRO-3), in the layout's contiguous parts
// (flat_layout.h). A pass gathers a piece when its turn comes, the next one meanwhile, and sums the
// gradient of a piece to those who have its part. Two layers, and the embedding or the head, are
// there at a time. Norms and biases are few: all of them are on every rank.
//
// All ranks make the same passes at once, since each needs the others' parts; a rank that has
// nothing to compute makes one that only gives and takes. One thread at a time.
#pragma once

#include <ATen/ATen.h>

#include <array>
#include <cstdint>
#include <functional>
#include <vector>

#include "torch/device_group.h"
#include "torch/flat_layout.h"
#include "torch/pass_pieces.h"
#include "torch/side_stream.h"

namespace leeway {

class ShardedWeights final : public PassPieces {
 public:
  // Zeros of type `compute`. `group` must outlive it.
  ShardedWeights(FlatLayout layout, at::Device device, at::ScalarType compute, DeviceGroup& group);

  const FlatLayout& layout() const { return layout_; }
  // This rank's part, which its owner changes; and norms and biases, from layout.decaying on.
  const at::Tensor& own() const { return own_; }
  const at::Tensor& rest() const { return rest_; }
  // Views of where the pieces are while they are read.
  const NetworkTensors& network() const { return network_; }

  // From here on gradients are summed into `own`, float32 numbers of this rank's part. Returns
  // where a pass leaves its own: the matrices of a piece are written, norms and biases added to.
  NetworkTensors use_gradients(const at::Tensor& own);
  const at::Tensor& rest_gradients() const { return rest_gradients_; }
  // Norms and biases come last, once for a step: all sums are there for the current stream then.
  void sum_rest();
  // After `own` has changed: on all ranks.
  void weights_changed();
  void hand_out_rest();

  // A pass begins: forward alone, or with the way back.
  void begin(bool trains);
  // The acts of a pass come in one order, which all ranks share.
  void at(PieceAct act, int64_t piece) override;
  // Takes part in what is left of the pass, with nothing computed. Gradients are unusable then
  // unless nothing was left, or all.
  void finish();

  // Brings all numbers by, in their order of reading: each(first number, numbers). A pass of its
  // own.
  void read_all(const std::function<void(int64_t, const at::Tensor&)>& each);

  // Gradients that have been given are in the own part for the current stream.
  void wait_for_sums() {
    for (const Place& place : places_) side_.wait(place.given);
  }

 private:
  struct Act {
    PieceAct act;
    int64_t piece;
    bool operator==(const Act&) const = default;
  };
  // Where pieces are: layers take turns in two places, a third is for the embedding and the head.
  static constexpr size_t kPlaces = 3;
  struct Place {
    at::Tensor weights, gradients;
    int64_t held = kNothing;
    SideStream::Mark arrived, given;
  };
  static constexpr int64_t kNothing = -3;

  bool is_tied() const { return layout_.config.tie_word_embeddings; }
  int64_t named(int64_t piece) const;
  FlatRange range_of(int64_t piece) const;
  Place& place_of(int64_t piece);
  NetworkTensors views(at::Tensor Place::*numbers, const at::Tensor& rest);
  void bring(int64_t piece);
  void read(int64_t piece);
  void give(int64_t piece);
  void perform(const Act& act, bool computes);
  // The own part of a range, within the range and within the part.
  struct OwnNumbers {
    int64_t in_range, in_part, count;
  };
  OwnNumbers own_of(const FlatRange& range) const;
  void gather(const FlatRange& range, const at::Tensor& numbers);
  void sum(const FlatRange& range, const at::Tensor& gradients);

  FlatLayout layout_;
  NetworkRanges ranges_;
  DeviceGroup& group_;
  at::Tensor own_, rest_, own_gradients_, rest_gradients_;
  std::array<Place, kPlaces> places_;
  NetworkTensors network_;
  std::vector<Act> acts_;  // of the pass at hand
  size_t next_ = 0;
  SideStream side_;  // goes first: it uses what is above
};

}  // namespace leeway
