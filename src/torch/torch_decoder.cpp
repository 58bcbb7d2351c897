#include "torch/torch_decoder.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include <algorithm>
#include <string>

#include "leeway/error.h"
#include "torch/compat.h"
#include "torch/layer_rows.h"
#include "torch/packed_sequences.h"

namespace leeway {

using torch::Tensor;

namespace {

// Returns the copy in the compute type and passes its gradient on to the master.
struct UseCopy : torch::autograd::Function<UseCopy> {
  static Tensor forward(torch::autograd::AutogradContext*, const Tensor&, const Tensor& copy) {
    return copy;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list gradients) {
    return {gradients[0].to(at::kFloat), Tensor()};
  }
};

// A parameter as passes use it; undefined where the family has none.
struct Weight {
  Tensor leaf;
  Tensor copy;  // in the compute type; undefined where the leaf is of that type

  // In the compute type, part of the graph.
  Tensor use() const {
    if (!copy.defined()) return leaf;
    return at::GradMode::is_enabled() && leaf.requires_grad() ? UseCopy::apply(leaf, copy) : copy;
  }
};

// The weights of one layer.
struct Layer {
  Weight input_norm, q, k, v, q_bias, k_bias, v_bias, q_norm, k_norm, o, o_bias, post_norm, gate,
      up, down;

  std::vector<Tensor> leaves() const {
    std::vector<Tensor> list;
    for (const Weight* weight : {&input_norm, &q, &k, &v, &q_bias, &k_bias, &v_bias, &q_norm,
                                 &k_norm, &o, &o_bias, &post_norm, &gate, &up, &down}) {
      if (weight->leaf.defined()) list.push_back(weight->leaf);
    }
    return list;
  }
};

// The sequences of a batch, and what their positions turn queries and keys by.
struct Packing {
  PackedSequences sequences;
  bool at_once = false;  // by `packed_attention`, else sequence by sequence
  TorchRopeTable rope;
};

// ---------------------------------------------------------------------------------------------
// The network

Tensor project(const Tensor& x, const Weight& weight, const Weight& bias = {}) {
  return bias.leaf.defined() ? at::linear(x, weight.use(), bias.use())
                             : at::linear(x, weight.use());
}

// Each key/value head once for every query head that reads it.
Tensor expand_heads(const Tensor& x, int64_t heads) {
  const int64_t group = heads / x.size(1);
  return x.unsqueeze(2).expand({-1, -1, group, -1}).reshape({x.size(0), heads, x.size(2)});
}

// q, k, v [N, heads, head_dim] to [N, heads * head_dim], sequence by sequence. (Split, because the
// gradient of a slice is as large as the sliced tensor.)
Tensor attend(const Tensor& q, const Tensor& k, const Tensor& v,
              const std::vector<int64_t>& lengths) {
  const std::vector<Tensor> queries = q.split_with_sizes(lengths);
  const std::vector<Tensor> keys = k.split_with_sizes(lengths);
  const std::vector<Tensor> values = v.split_with_sizes(lengths);
  std::vector<Tensor> outputs;
  for (size_t s = 0; s < lengths.size(); ++s) {
    outputs.push_back(causal_attention(queries[s].transpose(0, 1), keys[s].transpose(0, 1),
                                       values[s].transpose(0, 1))
                          .transpose(0, 1));
  }
  return at::cat(outputs).flatten(1);
}

Tensor attention(const ModelConfig& config, const Layer& layer, const Packing& packing,
                 const Tensor& x) {
  const int64_t heads = config.num_attention_heads, kv_heads = config.num_key_value_heads;
  Tensor q = project(x, layer.q, layer.q_bias).view({-1, heads, config.head_dim});
  Tensor k = project(x, layer.k, layer.k_bias).view({-1, kv_heads, config.head_dim});
  const Tensor v = project(x, layer.v, layer.v_bias).view({-1, kv_heads, config.head_dim});
  if (config.qk_norm) {
    q = rms_norm(q, layer.q_norm.use(), config.rms_norm_eps);
    k = rms_norm(k, layer.k_norm.use(), config.rms_norm_eps);
  }
  const PackedSequences& sequences = packing.sequences;
  q = rope(q, sequences.positions, packing.rope);
  k = rope(k, sequences.positions, packing.rope);
  const Tensor attended =
      packing.at_once
          ? packed_attention(q, k, v, sequences.offsets, sequences.longest).flatten(1)
          : attend(q, expand_heads(k, heads), expand_heads(v, heads), sequences.lengths);
  return project(attended, layer.o, layer.o_bias);
}

Tensor mlp(const Layer& layer, const Tensor& x) {
  return project(swiglu(project(x, layer.gate), project(x, layer.up)), layer.down);
}

// A layer with all it needs but the residual stream x [N, hidden_size].
struct LayerPass : torch::CustomClassHolder {
  ModelConfig config;
  Layer layer;
  std::shared_ptr<const Packing> packing;

  LayerPass(ModelConfig c, Layer l, std::shared_ptr<const Packing> p)
      : config(std::move(c)), layer(std::move(l)), packing(std::move(p)) {}

  Tensor run(const Tensor& x) const {
    const double eps = config.rms_norm_eps;
    const Tensor y =
        x + attention(config, layer, *packing, rms_norm(x, layer.input_norm.use(), eps));
    return y + mlp(layer, rms_norm(y, layer.post_norm.use(), eps));
  }
};

// ---------------------------------------------------------------------------------------------
// Recomputation

// Runs a layer without recording it, and again with recording when its gradient is requested. The
// weights are arguments so that autograd knows them.
struct RecomputedLayer : torch::autograd::Function<RecomputedLayer> {
  static Tensor forward(torch::autograd::AutogradContext* context,
                        const c10::intrusive_ptr<LayerPass>& pass, const Tensor& x,
                        at::TensorList weights) {
    // Saving them also makes a change in place before the backward pass an error.
    std::vector<Tensor> saved = weights.vec();
    saved.push_back(x);
    context->save_for_backward(std::move(saved));
    context->saved_data["pass"] = c10::IValue::make_capsule(pass);
    return pass->run(x);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list output_gradients) {
    const std::vector<Tensor> saved = context->get_saved_variables();
    const auto capsule = context->saved_data["pass"].toCapsule();
    const auto& pass = static_cast<const LayerPass&>(*capsule);
    const Tensor x = saved.back().detach().requires_grad_();
    std::vector<Tensor> wanted = {x};
    for (size_t i = 0; i + 1 < saved.size(); ++i) {
      if (saved[i].requires_grad()) wanted.push_back(saved[i]);
    }
    const at::AutoGradMode recording(true);
    const std::vector<Tensor> found =
        torch::autograd::grad({pass.run(x)}, wanted, output_gradients);
    // One entry per argument of `forward`: the pass, x, the weights.
    std::vector<Tensor> gradients = {Tensor(), found[0]};
    for (size_t i = 0, next = 1; i + 1 < saved.size(); ++i) {
      gradients.push_back(saved[i].requires_grad() ? found[next++] : Tensor());
    }
    return gradients;
  }
};

}  // namespace

// ---------------------------------------------------------------------------------------------
// The decoder

struct TorchDecoder::Impl {
  explicit Impl(const ModelConfig& model) : config(model), layout(model) {}

  ModelConfig config;
  FlatLayout layout;
  torch::ScalarType compute;
  Tensor flat, flat_copy;  // the second undefined where the first is of the compute type
  std::vector<Tensor> parameters, copies;  // their views; no copies: undefined
  TorchRopeTable rope;
  Weight embedding, final_norm, head;
  std::vector<Layer> layers;

  void refresh_copies() {
    const at::NoGradGuard guard;
    if (flat_copy.defined()) flat_copy.copy_(flat);
  }
};

TorchDecoder::TorchDecoder(const Parameters& parameters, torch::Device device,
                           torch::ScalarType compute, bool trains)
    : impl_(std::make_unique<Impl>(parameters.config())) {
  LEEWAY_CHECK(compute == at::kDouble || compute == at::kFloat || compute == at::kBFloat16 ||
                   compute == at::kHalf,
               "compute type " + std::string(c10::toString(compute)));
  Impl& impl = *impl_;
  impl.compute = compute;
  impl.rope = TorchRopeTable(impl.config, device);
  const NetworkPointers<const float> network = network_of(parameters);
  const at::ScalarType kept = trains && compute != at::kDouble ? at::kFloat : compute;
  impl.flat = at::zeros({impl.layout.size}, at::TensorOptions(device).dtype(kept));
  copy_to_flat(impl.layout, parameters, impl.flat);
  impl.parameters = parameter_views(impl.layout, impl.flat);
  impl.copies.resize(impl.parameters.size());
  if (kept != compute) {
    impl.flat_copy = impl.flat.to(compute);
    impl.copies = parameter_views(impl.layout, impl.flat_copy);
  }
  for (Tensor& leaf : impl.parameters) leaf.requires_grad_(trains);
  // By the place the native network gives each parameter.
  auto weight_of = [&](const float* place) {
    for (size_t i = 0; i < impl.parameters.size(); ++i) {
      if (place != nullptr && parameters.of(i).data() == place) {
        return Weight{impl.parameters[i], impl.copies[i]};
      }
    }
    return Weight();
  };
  impl.embedding = weight_of(network.embedding);
  impl.final_norm = weight_of(network.final_norm);
  impl.head = weight_of(network.head);
  for (const LayerPointers<const float>& at : network.layers) {
    impl.layers.push_back({.input_norm = weight_of(at.input_norm),
                           .q = weight_of(at.q),
                           .k = weight_of(at.k),
                           .v = weight_of(at.v),
                           .q_bias = weight_of(at.q_bias),
                           .k_bias = weight_of(at.k_bias),
                           .v_bias = weight_of(at.v_bias),
                           .q_norm = weight_of(at.q_norm),
                           .k_norm = weight_of(at.k_norm),
                           .o = weight_of(at.o),
                           .o_bias = weight_of(at.o_bias),
                           .post_norm = weight_of(at.post_norm),
                           .gate = weight_of(at.gate),
                           .up = weight_of(at.up),
                           .down = weight_of(at.down)});
  }
}

TorchDecoder::~TorchDecoder() = default;
TorchDecoder::TorchDecoder(TorchDecoder&&) noexcept = default;
TorchDecoder& TorchDecoder::operator=(TorchDecoder&&) noexcept = default;

const ModelConfig& TorchDecoder::config() const { return impl_->config; }
const std::vector<Tensor>& TorchDecoder::parameters() const { return impl_->parameters; }
void TorchDecoder::weights_changed() { impl_->refresh_copies(); }

Tensor TorchDecoder::forward(const Tensor& tokens, std::span<const int64_t> cu_seqlens,
                             bool recompute_activations) const {
  const at::Device device = impl_->flat.device();
  const auto packing = std::make_shared<const Packing>(
      Packing{PackedSequences(impl_->config, cu_seqlens, tokens.size(0), device),
              has_packed_attention(device, impl_->compute, impl_->config.head_dim), impl_->rope});
  Tensor x = at::embedding(impl_->embedding.leaf, tokens).to(impl_->compute);
  for (const Layer& layer : impl_->layers) {
    const auto pass = c10::make_intrusive<LayerPass>(impl_->config, layer, packing);
    if (recompute_activations) {
      const std::vector<Tensor> weights = layer.leaves();
      x = RecomputedLayer::apply(pass, x, at::TensorList(weights));
    } else {
      x = pass->run(x);
    }
  }
  return rms_norm(x, impl_->final_norm.use(), impl_->config.rms_norm_eps);
}

Tensor TorchDecoder::head_weight() const { return impl_->head.use(); }
const Tensor& TorchDecoder::head_parameter() const { return impl_->head.leaf; }

const FlatLayout& TorchDecoder::layout() const { return impl_->layout; }
const Tensor& TorchDecoder::flat_parameters() const { return impl_->flat; }
const Tensor& TorchDecoder::flat_weights() const {
  return impl_->flat_copy.defined() ? impl_->flat_copy : impl_->flat;
}
const TorchRopeTable& TorchDecoder::rope_table() const { return impl_->rope; }

void TorchDecoder::copy_to(Parameters& to) const { copy_to_host(impl_->layout, impl_->flat, to); }

void TorchDecoder::copy_from(const Parameters& from) {
  copy_to_flat(impl_->layout, from, impl_->flat);
  impl_->refresh_copies();
}

void TorchDecoder::copy_gradients_to(Parameters& to) const {
  const at::NoGradGuard guard;
  LEEWAY_CHECK(to.table().size() == impl_->parameters.size(), "gradients of another model");
  for (size_t i = 0; i < impl_->parameters.size(); ++i) {
    const Tensor& gradient = impl_->parameters[i].grad();
    Tensor host = at::from_blob(to.of(i).data(), impl_->layout.table[i].shape, at::kFloat);
    if (gradient.defined()) {
      host.copy_(gradient);
    } else {
      host.zero_();
    }
  }
}

}  // namespace leeway
