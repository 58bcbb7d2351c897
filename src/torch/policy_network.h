// A policy on a torch device as the trainer's backend computes with it: all weights, or an adapter
// over a base that the sampler and the reference read too (shared_base.h). Where it trains, what is
// trained has float32 masters; a base has none.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "config/run_config.h"
#include "torch/flat_adamw.h"
#include "torch/sharded_weights.h"
#include "torch/shared_base.h"
#include "torch/torch_decoder.h"
#include "torch/trunk.h"

namespace leeway {

// A forward pass that can be gone back: by the trunk's record, or by the graph of `hidden`.
struct RecordedPass {
  torch::Tensor hidden;
  TrunkRecord record;
};

// Views of gradients in the layout; those of a base are undefined.
struct PolicyGradients {
  NetworkTensors network;
  AdapterTensors adapter;
};

// One of several ranks, which updates its part of the layout.
struct RankPlace {
  int rank = 0, ranks = 1;
  DeviceGroup* sharded = nullptr;  // weights and gradients are in parts too, which it moves
};

class PolicyNetwork {
 public:
  // `base`: what `weights` is an adapter over, or is itself, if it is shared; null: `weights` are
  // all weights and copied. Passes go by the trunk where there are kernels for it and over shared
  // bases, else by the decoder and autograd. Split masters have their lower half for the part of
  // `place` alone. Weights in parts are zeros at first and always go by the trunk. Throws Error for
  // what the device has no kernels for: an adapter, or weights in parts.
  PolicyNetwork(const Parameters& weights, const std::shared_ptr<const Parameters>& base,
                torch::Device device, torch::ScalarType compute, bool trains, RankPlace place = {});

  // Of what is trained.
  const FlatLayout& layout() const {
    return sharded_ ? sharded_->layout() : adapter_ ? adapter_->layout : decoder_->layout();
  }
  FlatRange own() const { return layout().part_of(place_.rank, place_.ranks); }
  // As float32 on the host; what passes read follows. Not from split masters of a part, and neither
  // with weights in parts.
  void copy_to(Parameters& host) const;
  void copy_from(const Parameters& host);
  // Float32 numbers of the own part of weights in parts, from number `at` on.
  void copy_from(int64_t at, const torch::Tensor& numbers);
  // A float32 copy on the device. Not from split masters of a part.
  torch::Tensor copy() const;
  // Split masters, their lower half of the own part; undefined: they are not split.
  const torch::Tensor& low() const { return low_; }
  // What passes read, all of it or, of weights in parts, the own part.
  const torch::Tensor& high() const {
    return sharded_ ? sharded_->own() : decoder_->flat_weights();
  }
  // Weights in parts; null: they are whole. Their passes begin and finish there.
  ShardedWeights* sharded() const { return sharded_.get(); }

  // Whether passes go by the trunk.
  bool has_trunk() const { return trunk_.has_value(); }

  // Without a gradient.
  torch::Tensor forward(const torch::Tensor& tokens, std::span<const int64_t> cu_seqlens) const;
  RecordedPass record(const torch::Tensor& tokens, std::span<const int64_t> cu_seqlens,
                      Recompute recompute) const;
  // Gradients lie in `flat`, in the layout, from then on; of weights in parts those of the own
  // part, summed over ranks.
  PolicyGradients use_gradients(const torch::Tensor& flat);
  // As Trunk::backward, when the head's gradient is complete. Autograd always adds. `sums` is told
  // which gradients are complete, if weights are whole; autograd tells nothing.
  void backward(RecordedPass&& pass, const torch::Tensor& d_hidden,
                const PolicyGradients& gradients, bool are_new, PassPieces* sums = nullptr) const;
  bool can_overwrite_gradients() const { return trunk_.has_value(); }

  // For the optimizer's step: all that is this network's, of the own part.
  FlatAdamW weights_to_step() const;
  // What a step changes in the own part and other ranks need whole.
  std::vector<torch::Tensor> weights_to_hand_out() const;

  // Read now; with `trains` its gradient is written next.
  torch::Tensor head_weight(bool trains) const;
  void change_stream() const;  // as cuda/products.h
  cuda::Products* products() const { return trunk_ ? trunk_->products() : nullptr; }

 private:
  struct Adapter {
    FlatLayout layout;
    torch::Tensor copy;     // in the compute type, which passes read
    torch::Tensor masters;  // undefined where it does not train
  };
  void make_whole(const Parameters& weights, torch::Device device, torch::ScalarType compute,
                  bool trains);
  void make_sharded(const Parameters& weights, torch::Device device, torch::ScalarType compute,
                    bool trains);
  void make_over_base(const Parameters& weights, const std::shared_ptr<const Parameters>& base,
                      torch::Device device, torch::ScalarType compute, bool trains);
  SplitMasters masters() const {
    if (sharded_) return {sharded_->own(), low_};
    return {decoder_->flat_weights().narrow(0, own().begin, own().count), low_};
  }

  RankPlace place_;
  std::optional<TorchDecoder> decoder_;      // of whole weights
  std::unique_ptr<ShardedWeights> sharded_;  // of weights in parts
  torch::Tensor low_;                        // of their masters, if they are split
  std::shared_ptr<const SharedBase> base_;
  std::optional<Adapter> adapter_;
  std::optional<Trunk> trunk_;  // views of the above
};

}  // namespace leeway
