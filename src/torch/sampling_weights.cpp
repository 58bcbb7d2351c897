#include "torch/sampling_weights.h"

#include <algorithm>
#include <initializer_list>
#include <utility>

namespace leeway {

using at::Tensor;

namespace {

constexpr int64_t kStaged = int64_t{1} << 24;  // numbers copied at a time

}  // namespace

SamplingWeights::SamplingWeights(const ModelConfig& config, at::Device device,
                                 at::ScalarType compute)
    : config_(config) {
  const at::TensorOptions numbers = at::device(device).dtype(compute);
  const auto vector = [&](int64_t size, bool there = true) {
    return there ? at::zeros({size}, numbers) : Tensor();
  };
  const auto matrix = [&](int64_t outputs, int64_t inputs) {
    return at::zeros({outputs, inputs}, numbers);
  };
  staged_ = at::empty({kStaged}, at::TensorOptions(compute).pinned_memory(device.is_cuda()));

  const TorchRopeTable rope(config, device);
  const HeadCounts counts{config.num_attention_heads, config.num_key_value_heads, config.head_dim};
  const int64_t hidden = config.hidden_size, queries = counts.query_heads * counts.head_dim;
  const int64_t qkv = queries + 2 * counts.kv_heads * counts.head_dim;
  embedding = matrix(config.vocab_size, hidden);
  head = config.tie_word_embeddings ? embedding : matrix(config.vocab_size, hidden);
  head_t = head.t();
  final_norm = vector(hidden);
  for (int64_t i = 0; i < config.num_hidden_layers; ++i) {
    SamplingLayer layer;
    layer.input_norm = vector(hidden), layer.post_norm = vector(hidden);
    layer.qkv = matrix(qkv, hidden), layer.qkv_bias = vector(qkv, config.qkv_bias);
    layer.o = matrix(hidden, queries), layer.o_bias = vector(hidden, config.output_bias);
    layer.gate_up = matrix(2 * config.intermediate_size, hidden);
    layer.down = matrix(hidden, config.intermediate_size);
    layer.qkv_t = layer.qkv.t(), layer.o_t = layer.o.t();
    layer.gate_up_t = layer.gate_up.t(), layer.down_t = layer.down.t();
    layer.heads = {counts, vector(counts.head_dim, config.qk_norm),
                   vector(counts.head_dim, config.qk_norm), config.rms_norm_eps, rope};
    layers.push_back(std::move(layer));
  }
}

// Converted by all host threads into pinned memory, which the device reads fast.
void SamplingWeights::copy(const float* from, const Tensor& to) {
  if (!to.defined()) return;
  const Tensor flat = to.view(-1);
  for (int64_t begin = 0; begin < flat.size(0); begin += kStaged) {
    const int64_t count = std::min(kStaged, flat.size(0) - begin);
    const Tensor part = staged_.narrow(0, 0, count);
    part.copy_(at::from_blob(const_cast<float*>(from) + begin, {count}, at::kFloat));
    flat.narrow(0, begin, count).copy_(part);
  }
}

void SamplingWeights::copy(const Tensor* from, const Tensor& to) {
  if (to.defined()) to.copy_(*from, /*non_blocking=*/true);
}

void SamplingWeights::load(const Parameters& weights) { copy_all(network_of(weights)); }

void SamplingWeights::load(const TorchDeviceWeights& weights) {
  copy_all(network_by<const Tensor>(config_, [&](const std::string& name) -> const Tensor* {
    const auto& table = weights.table();
    const auto at = std::find_if(table.begin(), table.end(),
                                 [&](const ParameterInfo& info) { return info.name == name; });
    return at == table.end() ? nullptr
                             : &weights.tensors()[static_cast<size_t>(at - table.begin())];
  }));
}

template <class T>
void SamplingWeights::copy_all(const NetworkPointers<const T>& network) {
  const auto stack = [&](std::initializer_list<std::pair<const T*, int64_t>> parts,
                         const Tensor& to) {
    if (!to.defined()) return;
    int64_t row = 0;
    for (const auto& [from, rows] : parts) {
      copy(from, to.narrow(0, row, rows));
      row += rows;
    }
  };
  const int64_t queries = config_.num_attention_heads * config_.head_dim;
  const int64_t keys = config_.num_key_value_heads * config_.head_dim;
  const int64_t inner = config_.intermediate_size;
  copy(network.embedding, embedding);
  if (!config_.tie_word_embeddings) copy(network.head, head);
  copy(network.final_norm, final_norm);
  for (size_t i = 0; i < layers.size(); ++i) {
    const LayerPointers<const T>& from = network.layers[i];
    const SamplingLayer& to = layers[i];
    copy(from.input_norm, to.input_norm);
    stack({{from.q, queries}, {from.k, keys}, {from.v, keys}}, to.qkv);
    stack({{from.q_bias, queries}, {from.k_bias, keys}, {from.v_bias, keys}}, to.qkv_bias);
    copy(from.q_norm, to.heads.query_norm);
    copy(from.k_norm, to.heads.key_norm);
    copy(from.o, to.o);
    copy(from.o_bias, to.o_bias);
    copy(from.post_norm, to.post_norm);
    stack({{from.gate, inner}, {from.up, inner}}, to.gate_up);
    copy(from.down, to.down);
  }
}

}  // namespace leeway
