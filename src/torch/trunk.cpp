#include "torch/trunk.h"

#include <ATen/core/grad_mode.h>

#include <utility>

#include "leeway/error.h"
#include "torch/training_operations.h"

namespace leeway {

using at::Tensor;

Trunk::Trunk(const ModelConfig& config, NetworkTensors weights, const TorchRopeTable& rope)
    : config_(config),
      weights_(std::move(weights)),
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

// The residual stream is x + delta: a norm adds what the product before it gave.
Trunk::LayerPass Trunk::layer_forward(const LayerTensors& layer, const PackedSequences& sequences,
                                      const Tensor& x, const Tensor& delta, bool until_mlp) const {
  const double eps = config_.rms_norm_eps;
  const HeadWeights heads = heads_of(layer);
  LayerPass pass;
  TrunkRecord::Layer& kept = pass.kept;
  Tensor h = at::empty_like(x);
  kept.x = sum_and_norm(x, delta, layer.input_norm, eps, h);
  kept.qkv = product(h, layer.qkv, layer.qkv_bias);
  const auto [q, k] = pack_heads(heads, sequences.positions, kept.qkv);
  Attended attended = attention(sequences, q, k, values_of(heads, kept.qkv));
  kept.attended = std::move(attended.out), kept.lse = std::move(attended.lse);
  const Tensor from_attention = product(kept.attended.flatten(1), layer.o, layer.o_bias);
  kept.y = sum_and_norm(kept.x, from_attention, layer.post_norm, eps, h);
  if (until_mlp) return pass;
  kept.gate_up = product(h, layer.gate_up);
  Tensor s = at::empty({x.size(0), config_.intermediate_size}, x.options());
  swiglu_rows(kept.gate_up, s);
  pass.delta = product(s, layer.down);
  return pass;
}

// d is the gradient of the layer's output, and what is returned that of its input: the residual
// stream carries it past the norms.
Tensor Trunk::layer_backward(const LayerTensors& layer, const PackedSequences& sequences,
                             TrunkRecord::Layer&& kept, Tensor d, const LayerTensors& gradients,
                             bool are_new) const {
  const double eps = config_.rms_norm_eps;
  const HeadWeights heads = heads_of(layer);
  {  // The MLP.
    const auto [d_gate_up, s] = swiglu_backward(kept.gate_up, product(d, layer.down.t()));
    kept.gate_up = Tensor();
    weight_gradient(d, s, gradients.down, are_new, products_.get());
    const Tensor h = product(d_gate_up, layer.gate_up.t());  // its gradient, at first
    d = norm_backward(kept.y, layer.post_norm, eps, h, d, gradients.post_norm, h);
    weight_gradient(d_gate_up, h, gradients.gate_up, are_new, products_.get());
    kept.y = Tensor();
  }
  // Attention.
  const Tensor attended = kept.attended.flatten(1);
  weight_gradient(d, attended, gradients.o, are_new, products_.get());
  bias_gradient(d, gradients.o_bias);
  const Tensor d_attended = product(d, layer.o.t()).view(kept.attended.sizes());
  const auto [q, k] = pack_heads(heads, sequences.positions, kept.qkv);
  const HeadGradients d_heads =
      attention_backward(attention_gradients_.get(), sequences, q, k, values_of(heads, kept.qkv),
                         {kept.attended, kept.lse}, d_attended);
  const Tensor d_qkv = heads_backward(heads, sequences.positions, kept.qkv, d_heads,
                                      gradients.q_norm, gradients.k_norm);
  const Tensor h = product(d_qkv, layer.qkv.t());  // its gradient, at first
  d = norm_backward(kept.x, layer.input_norm, eps, h, d, gradients.input_norm, h);
  weight_gradient(d_qkv, h, gradients.qkv, are_new, products_.get());
  bias_gradient(d_qkv, gradients.qkv_bias);
  return d;
}

Tensor Trunk::forward(const Tensor& tokens, std::span<const int64_t> cu_seqlens,
                      Recompute recompute, TrunkRecord* record) const {
  const at::NoGradGuard guard;
  const PackedSequences sequences(config_, cu_seqlens, tokens.size(0), tokens.device());
  PassRows rows;
  rows.tokens = tokens.to(at::kInt);
  Tensor x = at::empty({tokens.size(0), config_.hidden_size}, weights_.embedding.options());
  Tensor delta;
  embed(weights_.embedding, rows, x);
  for (const LayerTensors& layer : weights_.layers) {
    LayerPass pass = layer_forward(layer, sequences, x, delta);
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
                     bool are_new) const {
  const at::NoGradGuard guard;
  LEEWAY_CHECK(record.layers.size() == weights_.layers.size(), "the record of a pass");
  Tensor d = norm_backward(record.last, weights_.final_norm, config_.rms_norm_eps,
                           d_hidden.contiguous(), Tensor(), gradients.final_norm);
  record.last = Tensor();
  for (size_t i = weights_.layers.size(); i-- > 0;) {
    TrunkRecord::Layer kept = std::move(record.layers[i]);
    record.layers[i] = {};
    if (!kept.qkv.defined()) {
      kept = layer_forward(weights_.layers[i], *record.sequences, kept.x, Tensor(), true).kept;
    }
    if (!kept.gate_up.defined()) {
      const LayerTensors& layer = weights_.layers[i];
      Tensor h = at::empty_like(kept.y);
      sum_and_norm(kept.y, Tensor(), layer.post_norm, config_.rms_norm_eps, h);
      kept.gate_up = product(h, layer.gate_up);
    }
    d = layer_backward(weights_.layers[i], *record.sequences, std::move(kept), std::move(d),
                       gradients.layers[i], are_new);
  }
  embed_backward(record.tokens, d, gradients.embedding);
}

}  // namespace leeway
