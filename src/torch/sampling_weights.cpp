#include "torch/sampling_weights.h"

#include <algorithm>
#include <string>
#include <utility>

#include "leeway/error.h"

namespace leeway {

using at::Tensor;

namespace {

constexpr int64_t kStaged = int64_t{1} << 24;  // numbers copied at a time

CodedTensor no_codes(int64_t rows, int64_t width, at::Device device) {
  CodedTensor coded = empty_coded(rows, width, device);
  coded.codes.zero_(), coded.scales.zero_();
  return coded;
}

}  // namespace

SamplingWeights::SamplingWeights(const ModelConfig& config, at::Device device,
                                 at::ScalarType compute, Options options)
    : config_(config),
      device_(device),
      compute_(compute),
      options_(options),
      rope_(config, device),
      layout_(config),
      kept_(options.fp8 ? FlatLayout::without_layer_matrices(config) : layout_) {
  staged_ = at::empty({kStaged}, at::TensorOptions(compute).pinned_memory(device.is_cuda()));
  if (options.at_once) use_own();
}

void SamplingWeights::use(const NetworkTensors& network) {
  const HeadCounts counts{config_.num_attention_heads, config_.num_key_value_heads,
                          config_.head_dim};
  embedding = network.embedding;
  head = network.head, head_t = head.t();
  final_norm = network.final_norm;
  layers.clear();
  for (const LayerTensors& from : network.layers) {
    SamplingLayer layer;
    layer.input_norm = from.input_norm, layer.post_norm = from.post_norm;
    layer.qkv_bias = from.qkv_bias, layer.o_bias = from.o_bias;
    if (options_.fp8) {
      const int64_t hidden = config_.hidden_size, inner = config_.intermediate_size;
      const int64_t queries = counts.query_heads * counts.head_dim;
      const int64_t qkv = queries + 2 * counts.kv_heads * counts.head_dim;
      layer.qkv_coded = no_codes(qkv, hidden, device_);
      layer.o_coded = no_codes(hidden, queries, device_);
      layer.gate_up_coded = no_codes(2 * inner, hidden, device_);
      layer.down_coded = no_codes(hidden, inner, device_);
    } else {
      layer.qkv = from.qkv, layer.o = from.o;
      layer.gate_up = from.gate_up, layer.down = from.down;
      layer.qkv_t = layer.qkv.t(), layer.o_t = layer.o.t();
      layer.gate_up_t = layer.gate_up.t(), layer.down_t = layer.down.t();
    }
    layer.heads = {counts, from.q_norm, from.k_norm, config_.rms_norm_eps, rope_};
    layers.push_back(std::move(layer));
  }
}

// Whole weights, in memory of this sampler's own.
bool SamplingWeights::use_own() {
  if (flat_.defined()) return false;
  base_.reset();
  adapter = {}, adapter_layout_.reset(), adapter_flat_ = Tensor(), low_width = 0;
  flat_ = at::zeros({kept_.size}, at::device(device_).dtype(compute_));
  use(network_views(kept_, flat_));
  return true;
}

// An adapter of this layout over a base that is shared.
bool SamplingWeights::use_base(const std::shared_ptr<const Parameters>& base,
                               const FlatLayout& layout) {
  auto there = base_on_device(base, device_, compute_);
  const bool same_adapter = adapter_layout_ && layout.lora->same_network(*adapter_layout_->lora);
  if (there == base_ && same_adapter) return false;
  base_ = std::move(there);
  flat_ = Tensor();
  use(base_->network);
  for (size_t i = 0; options_.fp8 && i < layers.size(); ++i) {
    const LayerTensors& from = base_->network.layers[i];
    code_rows(from.qkv, layers[i].qkv_coded), code_rows(from.o, layers[i].o_coded);
    code_rows(from.gate_up, layers[i].gate_up_coded), code_rows(from.down, layers[i].down_coded);
  }
  adapter_layout_ = layout;
  adapter_flat_ = at::zeros({layout.size}, at::device(device_).dtype(compute_));
  adapter = adapter_views(*adapter_layout_, adapter_flat_);
  low_width = static_cast<int64_t>(kMostLowRankParts) * layout.lora->rank;
  return true;
}

// The rows of a layer's codes that a matrix of the model's files has.
CodedTensor SamplingWeights::place_of_codes(const ParameterInfo& info) {
  const std::string prefix = "model.layers.";
  size_t end = 0;
  SamplingLayer& layer = layers.at(std::stoul(info.name.substr(prefix.size()), &end));
  const std::string module = info.name.substr(prefix.size() + end + 1);
  const int64_t queries = config_.num_attention_heads * config_.head_dim;
  const int64_t keys = config_.num_key_value_heads * config_.head_dim;
  const int64_t rows = info.shape[0];
  const auto part = [&](const CodedTensor& of, int64_t first) {
    return CodedTensor{of.codes.narrow(0, first, rows), of.scales.narrow(0, first, rows)};
  };
  if (module == "self_attn.q_proj.weight") return part(layer.qkv_coded, 0);
  if (module == "self_attn.k_proj.weight") return part(layer.qkv_coded, queries);
  if (module == "self_attn.v_proj.weight") return part(layer.qkv_coded, queries + keys);
  if (module == "self_attn.o_proj.weight") return part(layer.o_coded, 0);
  if (module == "mlp.gate_proj.weight") return part(layer.gate_up_coded, 0);
  if (module == "mlp.up_proj.weight") return part(layer.gate_up_coded, config_.intermediate_size);
  LEEWAY_CHECK(module == "mlp.down_proj.weight", "a matrix of a layer");
  return part(layer.down_coded, 0);
}

template <class Place>
void SamplingWeights::for_own_parameters(const Place& place) {
  size_t kept = 0;
  for (size_t i = 0; i < layout_.table.size(); ++i) {
    const ParameterInfo& info = layout_.table[i];
    if (!options_.fp8 || !is_layer_matrix(info)) {
      place(i, flat_.narrow(0, kept_.offsets[kept++], info.size()));
      continue;
    }
    const Tensor numbers = place(i, Tensor());
    CodedTensor to = place_of_codes(info);
    code_rows(numbers.view(info.shape), to);
  }
}

// Converted by all host threads into pinned memory, which the device reads fast.
bool SamplingWeights::load(const Parameters& weights) {
  if (weights.lora() != nullptr) {
    const bool moved = use_base(weights.base(), FlatLayout(weights));
    copy_to_flat(*adapter_layout_, weights, adapter_flat_);
    return moved;
  }
  const bool moved = use_own();
  LEEWAY_CHECK(weights.table().size() == layout_.table.size(), "weights of another model");
  for_own_parameters([&](size_t i, Tensor to) {
    const std::span<const float> from = weights.of(i);
    const auto size = static_cast<int64_t>(from.size());
    if (!to.defined()) to = at::empty({size}, at::device(device_).dtype(compute_));
    for (int64_t begin = 0; begin < size; begin += kStaged) {
      const int64_t count = std::min(kStaged, size - begin);
      const Tensor part = staged_.narrow(0, 0, count);
      part.copy_(at::from_blob(const_cast<float*>(from.data()) + begin, {count}, at::kFloat));
      to.narrow(0, begin, count).copy_(part);
    }
    return to;
  });
  return moved;
}

bool SamplingWeights::load(const TorchDeviceWeights& weights) {
  const bool is_adapter = weights.base() != nullptr;
  const bool moved = is_adapter ? use_base(weights.base(), weights.layout()) : use_own();
  const Tensor& from = weights.flat();
  if (is_adapter || !options_.fp8) {
    const Tensor& to = is_adapter ? adapter_flat_ : flat_;
    LEEWAY_CHECK(from.numel() == to.numel(), "weights of another model");
    to.copy_(from, /*non_blocking=*/true);
    return moved;
  }
  LEEWAY_CHECK(from.numel() == layout_.size, "weights of another model");
  for_own_parameters([&](size_t i, const Tensor& to) {
    const Tensor numbers = from.narrow(0, layout_.offsets[i], layout_.table[i].size());
    if (to.defined()) to.copy_(numbers, /*non_blocking=*/true);
    return numbers;
  });
  return moved;
}

}  // namespace leeway
