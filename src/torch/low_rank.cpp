#include "torch/low_rank.h"

#include "torch/training_operations.h"

namespace leeway {

using at::Tensor;

namespace {

// scale x a^T
Tensor scaled_low(cuda::Products* products, const LoraTensors& lora, double scale,
                  const Tensor& x) {
  Tensor low = at::empty({x.size(0), lora.a.size(0)}, x.options());
  project(products, x, lora.a.t(), Tensor(), low);
  return low.mul_(scale);
}

}  // namespace

Updates qkv_updates(const ModelConfig& config, const LayerAdapter& adapter) {
  const int64_t queries = config.num_attention_heads * config.head_dim;
  const int64_t keys = config.num_key_value_heads * config.head_dim;
  return {{&adapter.q, queries}, {&adapter.k, keys}, {&adapter.v, keys}};
}

Updates gate_up_updates(const ModelConfig& config, const LayerAdapter& adapter) {
  return {{&adapter.gate, config.intermediate_size}, {&adapter.up, config.intermediate_size}};
}

void add_low_rank(cuda::Products* products, const Updates& updates, double scale, const Tensor& x,
                  Tensor& y) {
  int64_t first = 0;
  for (const auto& [lora, outputs] : updates) {
    if (lora->a.defined()) {
      const Tensor low = scaled_low(products, *lora, scale, x);
      Tensor update = at::empty({x.size(0), outputs}, y.options());
      project(products, low, lora->b.t(), Tensor(), update);
      y.narrow(1, first, outputs).add_(update);
    }
    first += outputs;
  }
}

void low_rank_backward(cuda::Products* products, const Updates& updates, const Updates& gradients,
                       double scale, const Tensor& x, const Tensor& d_y, bool are_new,
                       Tensor& d_x) {
  int64_t first = 0;
  for (size_t i = 0; i < updates.size(); ++i) {
    const auto& [lora, outputs] = updates[i];
    if (lora->a.defined()) {
      const Tensor d_part = d_y.narrow(1, first, outputs).contiguous();
      weight_gradient(d_part, scaled_low(products, *lora, scale, x), gradients[i].lora->b, are_new);
      const Tensor d_low = at::mm(d_part, lora->b).mul_(scale);
      weight_gradient(d_low, x, gradients[i].lora->a, are_new);
      d_x.addmm_(d_low, lora->a);
    }
    first += outputs;
  }
}

}  // namespace leeway
