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
                                 at::ScalarType compute)
    : layout_(config), flat_(at::zeros({layout_.size}, at::device(device).dtype(compute))) {
  staged_ = at::empty({kStaged}, at::TensorOptions(compute).pinned_memory(device.is_cuda()));
  const TorchRopeTable rope(config, device);
  const HeadCounts counts{config.num_attention_heads, config.num_key_value_heads, config.head_dim};
  const NetworkTensors network = network_views(layout_, flat_);
  embedding = network.embedding;
  head = network.head, head_t = head.t();
  final_norm = network.final_norm;
  for (const LayerTensors& from : network.layers) {
    SamplingLayer layer;
    layer.input_norm = from.input_norm, layer.post_norm = from.post_norm;
    layer.qkv = from.qkv, layer.qkv_bias = from.qkv_bias;
    layer.o = from.o, layer.o_bias = from.o_bias;
    layer.gate_up = from.gate_up, layer.down = from.down;
    layer.qkv_t = layer.qkv.t(), layer.o_t = layer.o.t();
    layer.gate_up_t = layer.gate_up.t(), layer.down_t = layer.down.t();
    layer.heads = {counts, from.q_norm, from.k_norm, config.rms_norm_eps, rope};
    layers.push_back(std::move(layer));
  }
}

// Converted by all host threads into pinned memory, which the device reads fast.
void SamplingWeights::load(const Parameters& weights) {
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
}

void SamplingWeights::load(const TorchDeviceWeights& weights) {
  LEEWAY_CHECK(weights.layout().size == layout_.size, "weights of another model");
  flat_.copy_(weights.flat(), /*non_blocking=*/true);
}

}  // namespace leeway
