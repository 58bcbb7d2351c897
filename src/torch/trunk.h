// The decoder without its head, with a backward pass that is written out: the training path on CUDA
// in bf16. It computes what TorchDecoder does; the forward pass consists of the functions that
// sampling consists of, row by row.
//
// The same call gives the same bits, but for the gradient of attention (torch_training.h).
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "config/settings.h"
#include "torch/flat_layout.h"
#include "torch/packed_sequences.h"
#include "torch/pass_pieces.h"
#include "torch/sampling_operations.h"

namespace leeway {

namespace cuda {
class AttentionGradients;
}

// What a forward pass keeps for the backward pass.
struct TrunkRecord {
  struct Layer {
    at::Tensor x;  // the layer's input, [N, hidden_size]
    // Undefined with Recompute::layer.
    at::Tensor qkv;
    at::Tensor attended, lse;  // as training_operations.h's Attended
    at::Tensor y;              // x + attention
    at::Tensor gate_up;        // undefined with Recompute::selective too
  };
  at::Tensor tokens;  // int32 [N]
  std::optional<PackedSequences> sequences;
  std::vector<Layer> layers;
  at::Tensor last;  // the input of the final norm
};

class Trunk {
 public:
  // Weights in the compute type, views of memory that is read at every pass. Those of different
  // pieces may lie in the same memory, where `pieces` below puts them in time.
  Trunk(const ModelConfig& config, NetworkTensors weights, const TorchRopeTable& rope,
        AdapterTensors adapter = {});

  // hidden [N, hidden_size], after the final norm. Tokens, sequences and errors as in
  // TorchDecoder::forward. With `record` the pass can be gone back; `recompute` says what the
  // record is without, which changes no bit of the gradients. `pieces` is told of all but the head.
  at::Tensor forward(const at::Tensor& tokens, std::span<const int64_t> cu_seqlens,
                     Recompute recompute = Recompute::off, TrunkRecord* record = nullptr,
                     PassPieces* pieces = nullptr) const;

  // From d_hidden, the gradient of what the recorded pass returned, adds to `gradients`, float32
  // views beside the weights; those of the layers' matrices are written instead with `are_new`. The
  // head's is left alone, unless it is the embedding's. Undefined ones are not computed: those of a
  // base below an adapter, whose own are `adapter`. Takes the record apart.
  void backward(TrunkRecord&& record, const at::Tensor& d_hidden, const NetworkTensors& gradients,
                bool are_new = false, const AdapterTensors& adapter = {},
                PassPieces* pieces = nullptr) const;

  const at::Tensor& head_weight() const { return weights_.head; }
  cuda::Products* products() const { return products_.get(); }

 private:
  struct LayerPass {
    TrunkRecord::Layer kept;
    at::Tensor delta;  // what the layer adds to kept.y
  };
  at::Tensor product(const at::Tensor& x, const at::Tensor& weight,
                     const at::Tensor& bias = {}) const;
  HeadWeights heads_of(const LayerTensors& layer) const;
  // y += what the adapter makes of x, if there is one.
  void add_update(size_t layer, LowRankStack LayerAdapter::*stack, const at::Tensor& x,
                  at::Tensor& y) const;
  at::Tensor gate_up_of(size_t layer, const at::Tensor& h) const;
  // `until_mlp`: what comes before gate_up alone.
  LayerPass layer_forward(size_t layer, const PackedSequences& sequences, const at::Tensor& x,
                          const at::Tensor& delta, bool until_mlp = false) const;
  struct LayerGradients {
    const LayerTensors& weights;
    const LayerAdapter* adapter;  // null: there is none
    bool are_new;
  };
  at::Tensor layer_backward(size_t layer, const PackedSequences& sequences,
                            TrunkRecord::Layer&& kept, at::Tensor d,
                            const LayerGradients& gradients) const;

  ModelConfig config_;
  NetworkTensors weights_;
  AdapterTensors adapter_;
  TorchRopeTable rope_;
  std::shared_ptr<cuda::Products> products_;
  std::shared_ptr<cuda::AttentionGradients> attention_gradients_;
};

}  // namespace leeway
