#include "torch/sampling_weights.h"

#include <algorithm>
#include <utility>

#include "leeway/error.h"

namespace leeway {

using at::Tensor;

namespace {

constexpr int64_t kStaged = int64_t{1} << 24;  // numbers copied at a time

}  // namespace

SamplingWeights::SamplingWeights(const ModelConfig& config, at::Device device,
                                 at::ScalarType compute, bool at_once)
    : config_(config), device_(device), compute_(compute), rope_(config, device), layout_(config) {
  staged_ = at::empty({kStaged}, at::TensorOptions(compute).pinned_memory(device.is_cuda()));
  if (at_once) use_own();
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
    layer.qkv = from.qkv, layer.qkv_bias = from.qkv_bias;
    layer.o = from.o, layer.o_bias = from.o_bias;
    layer.gate_up = from.gate_up, layer.down = from.down;
    layer.qkv_t = layer.qkv.t(), layer.o_t = layer.o.t();
    layer.gate_up_t = layer.gate_up.t(), layer.down_t = layer.down.t();
    layer.heads = {counts, from.q_norm, from.k_norm, config_.rms_norm_eps, rope_};
    layers.push_back(std::move(layer));
  }
}

// Whole weights, in memory of this sampler's own.
bool SamplingWeights::use_own() {
  if (flat_.defined()) return false;
  base_.reset();
  adapter = {}, adapter_layout_.reset(), adapter_flat_ = Tensor(), low_width = 0;
  flat_ = at::zeros({layout_.size}, at::device(device_).dtype(compute_));
  use(network_views(layout_, flat_));
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
  adapter_layout_ = layout;
  adapter_flat_ = at::zeros({layout.size}, at::device(device_).dtype(compute_));
  adapter = adapter_views(*adapter_layout_, adapter_flat_);
  low_width = static_cast<int64_t>(kMostLowRankParts) * layout.lora->rank;
  return true;
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
  for (size_t i = 0; i < layout_.table.size(); ++i) {
    const std::span<const float> from = weights.of(i);
    const auto size = static_cast<int64_t>(from.size());
    for (int64_t begin = 0; begin < size; begin += kStaged) {
      const int64_t count = std::min(kStaged, size - begin);
      const Tensor part = staged_.narrow(0, 0, count);
      part.copy_(at::from_blob(const_cast<float*>(from.data()) + begin, {count}, at::kFloat));
      flat_.narrow(0, layout_.offsets[i] + begin, count).copy_(part);
    }
  }
  return moved;
}

bool SamplingWeights::load(const TorchDeviceWeights& weights) {
  const bool is_adapter = weights.base() != nullptr;
  const bool moved = is_adapter ? use_base(weights.base(), weights.layout()) : use_own();
  const Tensor& to = is_adapter ? adapter_flat_ : flat_;
  LEEWAY_CHECK(weights.flat().numel() == to.numel(), "weights of another model");
  to.copy_(weights.flat(), /*non_blocking=*/true);
  return moved;
}

}  // namespace leeway
