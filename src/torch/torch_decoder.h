// The decoder in ATen operations, with gradients by autograd: the training path on CUDA, and the
// readable reference of the native CPU path.
//
// Parameters are float32 leaves ("masters"; float64 when the compute type is). Where the compute
// type is a half precision, a copy in it is what passes read, made once and again when the weights
// have changed; gradients arrive at the masters, in their precision. Norms,
// rotary positions and softmax are computed in float32 (float64), rotary angles always in float32:
// transformers does so, and at large positions the rounding of an angle is seen in the logits.
//
// Sequences lie side by side without padding; attention stays within each and positions restart.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "model/parameters.h"

namespace leeway {

class TorchDecoder {
 public:
  // Copies the weights to `device`. `compute`: float64, float32, bfloat16 or float16. With `trains`
  // false there are no masters and no gradients: weights are in the compute type alone.
  TorchDecoder(const Parameters& parameters, torch::Device device, torch::ScalarType compute,
               bool trains = true);
  ~TorchDecoder();
  TorchDecoder(TorchDecoder&&) noexcept;
  TorchDecoder& operator=(TorchDecoder&&) noexcept;

  const ModelConfig& config() const;
  // The leaves, aligned with Parameters::table(). An optimizer changes them in place, between a
  // backward pass and the next forward, and then calls `weights_changed`.
  const std::vector<torch::Tensor>& parameters() const;
  void weights_changed();

  // hidden [N, hidden_size] in the compute type, after the final norm. `tokens` is int64 [N] on the
  // decoder's device, ids in range (checked by whoever took them from a user). Sequence s holds
  // tokens cu_seqlens[s] .. cu_seqlens[s+1]; throws Error if these do not rise from 0 to N, or a
  // sequence is longer than the model. With `recompute_activations` a layer's input alone is kept
  // for the backward pass and the layer is run again there.
  torch::Tensor forward(const torch::Tensor& tokens, std::span<const int64_t> cu_seqlens,
                        bool recompute_activations) const;

  // [vocab_size, hidden_size] in the compute type, part of the graph; tied: from the embedding.
  torch::Tensor head_weight() const;
  // Its leaf, one of `parameters`; tied: the embedding's.
  const torch::Tensor& head_parameter() const;

  // Weights and gradients as float32 on the host; `to` and `from` have this decoder's config. A
  // parameter that no backward pass has reached has gradient zero.
  void copy_to(Parameters& to) const;
  void copy_from(const Parameters& from);
  void copy_gradients_to(Parameters& to) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace leeway
