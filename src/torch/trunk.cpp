#include "torch/trunk.h"

#include <ATen/core/grad_mode.h>

#include <utility>

#include "leeway/error.h"
#include "torch/low_rank.h"
#include "torch/training_operations.h"

namespace leeway {

using at::Tensor;

namespace {

void tell(PassPieces* pieces, PieceAct act, int64_t piece) {
  if (pieces != nullptr) pieces->at(act, piece);
}
void tell(PassPieces* pieces, PieceAct act, size_t layer) {
  tell(pieces, act, static_cast<int64_t>(layer));
}

}  // namespace

Trunk::Trunk(const ModelConfig& config, NetworkTensors weights, const TorchRopeTable& rope,
             AdapterTensors adapter)
    : config_(config),
      weights_(std::move(weights)),
      adapter_(std::move(adapter)),
      rope_(rope),
      products_(make_products(weights_.embedding.device())),
      attention_gradients_(make_attention_gradients(weights_.embedding.device())) {}

// x weight^T + bias.
Tensor Trunk::product(const Tensor& x, const Tensor& weight, const Tensor& bias) const {
  Tensor y = at::empty({x.size(0), weight.size(0)}, x.options());
  project(products_.get(), x, weight.t(), bias, y);
  return y;
}

HeadWeights Trunk::heads_of(const LayerTensors& layer) const {
  return {{config_.num_attention_heads, config_.num_key_value_heads, config_.head_dim},
          layer.q_norm,
          layer.k_norm,
          config_.rms_norm_eps,
          rope_};
}

void Trunk::add_update(size_t layer, LowRankStack LayerAdapter::*stack, const Tensor& x,
                       Tensor& y) const {
  if (adapter_.layers.empty()) return;
  add_low_rank(products_.get(), adapter_.layers[layer].*stack, adapter_.scale, x, y);
}

Tensor Trunk::gate_up_of(size_t layer, const Tensor& h) const {
  Tensor gate_up = product(h, weights_.layers[layer].gate_up);
  add_update(layer, &LayerAdapter::gate_up, h, gate_up);
  return gate_up;
}

// The residual stream is x + delta: a norm adds what the product before it gave.
Trunk::LayerPass Trunk::layer_forward(size_t number, const PackedSequences& sequences,
                                      const Tensor& x, const Tensor& delta, bool until_mlp) const {
  const LayerTensors& layer = weights_.layers[number];
  const double eps = config_.rms_norm_eps;
  const HeadWeights heads = heads_of(layer);
  LayerPass pass;
  TrunkRecord::Layer& kept = pass.kept;
  Tensor h = at::empty_like(x);
  kept.x = sum_and_norm(x, delta, layer.input_norm, eps, h);
  kept.qkv = product(h, layer.qkv, layer.qkv_bias);
  add_update(number, &LayerAdapter::qkv, h, kept.qkv);
  const auto [q, k] = pack_heads(heads, sequences.positions, kept.qkv);
  Attended attended = attention(sequences, q, k, values_of(heads, kept.qkv));
  kept.attended = std::move(attended.out), kept.lse = std::move(attended.lse);
  Tensor from_attention = product(kept.attended.flatten(1), layer.o, layer.o_bias);
  add_update(number, &LayerAdapter::o, kept.attended.flatten(1), from_attention);
  kept.y = sum_and_norm(kept.x, from_attention, layer.post_norm, eps, h);
  if (until_mlp) return pass;
  kept.gate_up = gate_up_of(number, h);
  Tensor s = at::empty({x.size(0), config_.intermediate_size}, x.options());
  swiglu_rows(kept.gate_up, s);
  pass.delta = product(s, layer.down);
  add_update(number, &LayerAdapter::down, s, pass.delta);
  return pass;
}

// d is the gradient of the layer's output, and what is returned that of its input: the residual
// stream carries it past the norms.
Tensor Trunk::layer_backward(size_t number, const PackedSequences& sequences,
                             TrunkRecord::Layer&& kept, Tensor d,
                             const LayerGradients& layer_gradients) const {
  const LayerTensors& layer = weights_.layers[number];
  const auto& [gradients, adapter, are_new] = layer_gradients;
  const auto weigh = [are_new = are_new](const Tensor& d_y, const Tensor& x, const Tensor& d_w) {
    if (d_w.defined()) weight_gradient(d_y, x, d_w, are_new);
  };
  // The adapter's share of a product's gradients: that of its input first, where d_y is at hand and
  // x is not yet.
  const auto update_backward = [&](LowRankStack LayerAdapter::*stack, const Tensor& d_y,
                                   Tensor& d_x) {
    if (adapter_.layers.empty()) return Tensor();
    return low_rank_backward(adapter_.layers[number].*stack, adapter_.scale, d_y, d_x);
  };
  const auto update_gradients = [&, adapter = adapter, are_new = are_new](
                                    LowRankStack LayerAdapter::*stack, const Tensor& d_y,
                                    const Tensor& x, const Tensor& d_low) {
    if (adapter == nullptr) return;
    low_rank_gradients(products_.get(), adapter_.layers[number].*stack, adapter_.scale, x, d_y,
                       d_low, adapter->*stack, are_new);
  };
  const double eps = config_.rms_norm_eps;
  const HeadWeights heads = heads_of(layer);
  {  // The MLP.
    Tensor d_s = product(d, layer.down.t());
    Tensor d_low = update_backward(&LayerAdapter::down, d, d_s);
    const auto [d_gate_up, s] = swiglu_backward(kept.gate_up, d_s);
    kept.gate_up = Tensor();
    weigh(d, s, gradients.down);
    update_gradients(&LayerAdapter::down, d, s, d_low);
    Tensor h = product(d_gate_up, layer.gate_up.t());  // its gradient, at first
    d_low = update_backward(&LayerAdapter::gate_up, d_gate_up, h);
    d = norm_backward(kept.y, layer.post_norm, eps, h, d, gradients.post_norm, h);
    weigh(d_gate_up, h, gradients.gate_up);
    update_gradients(&LayerAdapter::gate_up, d_gate_up, h, d_low);
    kept.y = Tensor();
  }
  // Attention.
  const Tensor attended = kept.attended.flatten(1);
  weigh(d, attended, gradients.o);
  bias_gradient(d, gradients.o_bias);
  Tensor d_rows = product(d, layer.o.t());
  Tensor d_low = update_backward(&LayerAdapter::o, d, d_rows);
  update_gradients(&LayerAdapter::o, d, attended, d_low);
  const Tensor d_attended = d_rows.view(kept.attended.sizes());
  const auto [q, k] = pack_heads(heads, sequences.positions, kept.qkv);
  const HeadGradients d_heads =
      attention_backward(attention_gradients_.get(), sequences, q, k, values_of(heads, kept.qkv),
                         {kept.attended, kept.lse}, d_attended);
  const Tensor d_qkv = heads_backward(heads, sequences.positions, kept.qkv, d_heads,
                                      gradients.q_norm, gradients.k_norm);
  Tensor h = product(d_qkv, layer.qkv.t());  // its gradient, at first
  d_low = update_backward(&LayerAdapter::qkv, d_qkv, h);
  d = norm_backward(kept.x, layer.input_norm, eps, h, d, gradients.input_norm, h);
  weigh(d_qkv, h, gradients.qkv);
  update_gradients(&LayerAdapter::qkv, d_qkv, h, d_low);
  bias_gradient(d_qkv, gradients.qkv_bias);
  return d;
}

Tensor Trunk::forward(const Tensor& tokens, std::span<const int64_t> cu_seqlens,
                      Recompute recompute, TrunkRecord* record, PassPieces* pieces) const {
  const at::NoGradGuard guard;
  const PackedSequences sequences(config_, cu_seqlens, tokens.size(0), tokens.device());
  PassRows rows;
  rows.tokens = tokens.to(at::kInt);
  Tensor x = at::empty({tokens.size(0), config_.hidden_size}, weights_.embedding.options());
  Tensor delta;
  tell(pieces, PieceAct::read, kEmbeddingPiece);
  embed(weights_.embedding, rows, x);
  for (size_t i = 0; i < weights_.layers.size(); ++i) {
    tell(pieces, PieceAct::read, i);
    LayerPass pass = layer_forward(i, sequences, x, delta);
    x = pass.kept.y, delta = std::move(pass.delta);
    if (record == nullptr) continue;
    TrunkRecord::Layer& kept = record->layers.emplace_back();
    if (recompute == Recompute::layer) {
      kept.x = pass.kept.x;
    } else {
      kept = std::move(pass.kept);
      if (recompute == Recompute::selective) kept.gate_up = Tensor();
    }
  }
  Tensor hidden = at::empty_like(x);
  const Tensor last = sum_and_norm(x, delta, weights_.final_norm, config_.rms_norm_eps, hidden);
  if (record != nullptr) {
    record->tokens = rows.tokens;
    record->sequences = sequences;
    record->last = last;
  }
  return hidden;
}

void Trunk::backward(TrunkRecord&& record, const Tensor& d_hidden, const NetworkTensors& gradients,
                     bool are_new, const AdapterTensors& adapter, PassPieces* pieces) const {
  const at::NoGradGuard guard;
  LEEWAY_CHECK(record.layers.size() == weights_.layers.size(), "the record of a pass");
  Tensor d = norm_backward(record.last, weights_.final_norm, config_.rms_norm_eps,
                           d_hidden.contiguous(), Tensor(), gradients.final_norm);
  record.last = Tensor();
  for (size_t i = weights_.layers.size(); i-- > 0;) {
    TrunkRecord::Layer kept = std::move(record.layers[i]);
    record.layers[i] = {};
    tell(pieces, PieceAct::work, i);
    if (!kept.qkv.defined()) {
      kept = layer_forward(i, *record.sequences, kept.x, Tensor(), true).kept;
    }
    if (!kept.gate_up.defined()) {
      Tensor h = at::empty_like(kept.y);
      sum_and_norm(kept.y, Tensor(), weights_.layers[i].post_norm, config_.rms_norm_eps, h);
      kept.gate_up = gate_up_of(i, h);
    }
    const LayerAdapter* of_adapter = adapter.layers.empty() ? nullptr : &adapter.layers[i];
    d = layer_backward(i, *record.sequences, std::move(kept), std::move(d),
                       {gradients.layers[i], of_adapter, are_new});
    tell(pieces, PieceAct::give, i);
  }
  if (!gradients.embedding.defined()) return;
  tell(pieces, PieceAct::write, kEmbeddingPiece);
  embed_backward(record.tokens, d, gradients.embedding);
  tell(pieces, PieceAct::give, kEmbeddingPiece);
}

}  // namespace leeway
