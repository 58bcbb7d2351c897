// Models that the decoder's tests make: small, with sizes that differ from each other and several
// groups of heads.
#pragma once

#include <torch/csrc/autograd/autograd.h>

#include <string>
#include <vector>

#include "base/rng.h"
#include "torch/torch_decoder.h"

namespace leeway::testing {

using torch::Tensor;

inline ModelConfig small_config(Family family) {
  ModelConfig config;
  config.family = family;
  config.vocab_size = 37;
  config.hidden_size = 24;
  config.intermediate_size = 40;
  config.num_hidden_layers = 2;
  config.num_attention_heads = 6;
  config.num_key_value_heads = 2;
  config.head_dim = 8;
  config.max_position_embeddings = 64;
  config.qk_norm = family == Family::qwen3;
  config.qkv_bias = family == Family::qwen2;
  config.tie_word_embeddings = family == Family::qwen2;
  if (family == Family::llama) config.llama3_rope = Llama3Rope{8.0, 1.0, 4.0, 32};
  return config;
}

// Norms and biases are random too, so that no ones or zeros hide anything.
inline Parameters random_parameters(const ModelConfig& config, uint64_t seed) {
  Parameters parameters(config);
  Rng rng(seed);
  for (size_t i = 0; i < parameters.table().size(); ++i) {
    const bool is_norm = parameters.table()[i].role == ParameterInfo::Role::norm;
    for (float& value : parameters.of(i)) {
      value = static_cast<float>(is_norm ? 1.0 + 0.3 * rng.normal() : 0.3 * rng.normal());
    }
  }
  return parameters;
}

inline const std::vector<int64_t> kLengths = {1, 9, 3, 14};

inline std::vector<int64_t> offsets_of(const std::vector<int64_t>& lengths) {
  std::vector<int64_t> offsets = {0};
  for (int64_t length : lengths) offsets.push_back(offsets.back() + length);
  return offsets;
}

inline Tensor random_tokens(const ModelConfig& config, int64_t count, uint64_t seed) {
  Rng rng(seed);
  Tensor tokens = at::empty({count}, at::kLong);
  for (int64_t t = 0; t < count; ++t) {
    tokens.data_ptr<int64_t>()[t] =
        static_cast<int64_t>(rng.below(static_cast<uint64_t>(config.vocab_size)));
  }
  return tokens;
}

inline Tensor logits_of(const TorchDecoder& decoder, const Tensor& tokens,
                        std::span<const int64_t> cu_seqlens, bool recompute = false) {
  return at::matmul(decoder.forward(tokens, cu_seqlens, recompute), decoder.head_weight().t());
}

// A loss that looks at every logit, each with another weight.
inline Tensor any_loss(const Tensor& logits) {
  return (at::log_softmax(logits, -1) *
          at::linspace(-1.0, 2.0, logits.numel(), logits.options()).sin().view(logits.sizes()))
      .sum();
}

// Gradients of all parameters; the leaves' own are left as they were.
inline std::vector<Tensor> gradients_of(const TorchDecoder& decoder, const Tensor& loss) {
  return torch::autograd::grad({loss}, decoder.parameters());
}

inline std::vector<torch::Device> devices() {
  std::vector<torch::Device> list = {at::kCPU};
  if (at::hasCUDA()) list.emplace_back(at::kCUDA, 0);
  return list;
}

inline double relative_difference(const Tensor& a, const Tensor& b) {
  return ((a - b).norm() / (b.norm() + 1e-30)).item<double>();
}

inline const std::vector<Family> kFamilies = {Family::qwen3, Family::qwen2, Family::llama};

inline std::string describe(Family family) {
  return family == Family::qwen3 ? "qwen3" : family == Family::qwen2 ? "qwen2" : "llama";
}

// The gradient of hidden states that a backward pass starts from.
inline at::Tensor any_gradient(const at::Tensor& hidden) {
  return at::linspace(-1.0, 2.0, hidden.numel(), hidden.options().dtype(at::kFloat))
      .mul(7.0)
      .sin()
      .view(hidden.sizes())
      .to(hidden.scalar_type());
}

}  // namespace leeway::testing
