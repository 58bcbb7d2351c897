// The decoder in ATen operations, with gradients by autograd: the readable reference for the native
// CPU path and for the trunk (trunk.h), and the training path where the trunk has no kernels.
//
// Parameters are float32 leaves ("masters"; float64 if the compute type is). If the compute type is
// a half precision, passes read a copy in it, which is renewed when the weights have changed;
// gradients accumulate in the masters, in their precision. Norms, RoPE and softmax are computed in
// float32 (float64), RoPE angles always in float32, as in transformers: at large positions the
// rounding of an angle is visible in the logits.
//
// Sequences are packed without padding; attention stays within each and positions restart.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "model/parameters.h"
#include "torch/flat_layout.h"
#include "torch/rope_table.h"

namespace leeway {

class TorchDecoder {
 public:
  // Copies the weights to `device`. `compute`: float64, float32, bfloat16 or float16. With `trains`
  // false there are no masters and no gradients: weights exist only in the compute type.
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

  // The same in one piece: the leaves, and what passes read of them, in the compute type.
  const FlatLayout& layout() const;
  const torch::Tensor& flat_parameters() const;
  const torch::Tensor& flat_weights() const;
  const TorchRopeTable& rope_table() const;

  // hidden [N, hidden_size] in the compute type, after the final norm. `tokens` is int64 [N] on the
  // decoder's device; the caller checks ids that come from a user. Sequence s consists of tokens
  // cu_seqlens[s] .. cu_seqlens[s+1]; throws Error if these do not increase from 0 to N, or if a
  // sequence is longer than the model allows. With `recompute_activations` only a layer's input is
  // stored for the backward pass, which runs the layer again.
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
