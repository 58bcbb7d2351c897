#include "torch/torch_decoder.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include <algorithm>
#include <string>

#include "leeway/error.h"
#include "torch/compat.h"
#include "torch/layer_rows.h"

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

// The sequences of a batch, and where its tokens sit in them.
struct Packing {
  std::vector<int64_t> lengths;
  int64_t longest = 0;
  Tensor offsets;    // for `packed_attention`; undefined: sequence by sequence
  Tensor positions;  // int32 [N]
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
  q = rope(q, packing.positions, packing.rope);
  k = rope(k, packing.positions, packing.rope);
  const Tensor attended =
      packing.offsets.defined()
          ? packed_attention(q, k, v, packing.offsets, packing.longest).flatten(1)
          : attend(q, expand_heads(k, heads), expand_heads(v, heads), packing.lengths);
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

// ---------------------------------------------------------------------------------------------
// Sequences

void check_cu_seqlens(const ModelConfig& config, std::span<const int64_t> cu_seqlens,
                      int64_t tokens) {
  if (cu_seqlens.size() < 2 || cu_seqlens.front() != 0 || cu_seqlens.back() != tokens) {
    throw Error("cu_seqlens: must run from 0 to the number of tokens, " + std::to_string(tokens));
  }
  for (size_t s = 0; s + 1 < cu_seqlens.size(); ++s) {
    const int64_t length = cu_seqlens[s + 1] - cu_seqlens[s];
    const std::string where =
        "cu_seqlens: sequence " + std::to_string(s) + " has " + std::to_string(length) + " tokens";
    if (length < 1) throw Error(where + "; every sequence needs at least one");
    if (length > config.max_position_embeddings) {
      throw Error(where + ", the model takes at most max_position_embeddings = " +
                  std::to_string(config.max_position_embeddings) + "; cut it or leave it out");
    }
  }
}

// The host's float32 values as a tensor that shares their memory; only read where they are const.
Tensor host_view(std::span<const float> values, const std::vector<int64_t>& shape) {
  return at::from_blob(const_cast<float*>(values.data()), shape, at::TensorOptions(at::kFloat));
}

}  // namespace

// ---------------------------------------------------------------------------------------------
// The decoder

struct TorchDecoder::Impl {
  ModelConfig config;
  std::vector<ParameterInfo> table;
  torch::ScalarType compute;
  std::vector<Tensor> parameters;
  std::vector<Tensor> copies;  // beside them; undefined where none is needed
  TorchRopeTable rope;
  Weight embedding, final_norm, head;
  std::vector<Layer> layers;

  std::shared_ptr<const Packing> pack(std::span<const int64_t> cu_seqlens) const {
    auto packing = std::make_shared<Packing>();
    std::vector<int32_t> positions;
    for (size_t s = 0; s + 1 < cu_seqlens.size(); ++s) {
      const int64_t length = cu_seqlens[s + 1] - cu_seqlens[s];
      packing->lengths.push_back(length);
      packing->longest = std::max(packing->longest, length);
      for (int64_t t = 0; t < length; ++t) positions.push_back(static_cast<int32_t>(t));
    }
    const at::Device device = rope.cosines.device();
    const auto on_device = [&](std::vector<int32_t>& numbers) {
      return at::from_blob(numbers.data(), {static_cast<int64_t>(numbers.size())}, at::kInt)
          .to(device, at::kInt, /*non_blocking=*/false, /*copy=*/true);
    };
    if (has_packed_attention(device, compute, config.head_dim)) {
      std::vector<int32_t> offsets(cu_seqlens.begin(), cu_seqlens.end());
      packing->offsets = on_device(offsets);
    }
    packing->positions = on_device(positions);
    packing->rope = rope;
    return packing;
  }

  void refresh_copies() {
    const at::NoGradGuard guard;
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (copies[i].defined()) copies[i].copy_(parameters[i]);
    }
  }
};

TorchDecoder::TorchDecoder(const Parameters& parameters, torch::Device device,
                           torch::ScalarType compute, bool trains)
    : impl_(std::make_unique<Impl>()) {
  LEEWAY_CHECK(compute == at::kDouble || compute == at::kFloat || compute == at::kBFloat16 ||
                   compute == at::kHalf,
               "compute type " + std::string(c10::toString(compute)));
  Impl& impl = *impl_;
  impl.config = parameters.config();
  impl.table = parameters.table();
  impl.compute = compute;
  impl.rope = TorchRopeTable(impl.config, device);
  const NetworkPointers<const float> network = network_of(parameters);
  const at::ScalarType kept = trains && compute != at::kDouble ? at::kFloat : compute;
  for (size_t i = 0; i < impl.table.size(); ++i) {
    const std::span<const float> values = parameters.of(i);
    const Tensor host = host_view(values, impl.table[i].shape);
    const Tensor leaf = host.to(at::TensorOptions(device).dtype(kept), false, /*copy=*/true);
    // Rows of the embedding are looked up among the leaf's.
    const bool looked_up = values.data() == network.embedding && network.head != network.embedding;
    impl.copies.push_back(kept == compute || looked_up ? Tensor() : leaf.to(compute));
    impl.parameters.push_back(leaf);
    impl.parameters.back().requires_grad_(trains);
  }
  // By the place the native network gives each parameter.
  auto weight_of = [&](const float* place) {
    for (size_t i = 0; i < impl.table.size(); ++i) {
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
  check_cu_seqlens(impl_->config, cu_seqlens, tokens.size(0));
  const std::shared_ptr<const Packing> packing = impl_->pack(cu_seqlens);
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

void TorchDecoder::copy_to(Parameters& to) const {
  const at::NoGradGuard guard;
  LEEWAY_CHECK(to.table().size() == impl_->table.size(), "weights of another model");
  for (size_t i = 0; i < impl_->table.size(); ++i) {
    host_view(to.of(i), impl_->table[i].shape).copy_(impl_->parameters[i]);
  }
}

void TorchDecoder::copy_from(const Parameters& from) {
  const at::NoGradGuard guard;
  LEEWAY_CHECK(from.table().size() == impl_->table.size(), "weights of another model");
  for (size_t i = 0; i < impl_->table.size(); ++i) {
    impl_->parameters[i].copy_(host_view(from.of(i), impl_->table[i].shape));
  }
  impl_->refresh_copies();
}

void TorchDecoder::copy_gradients_to(Parameters& to) const {
  const at::NoGradGuard guard;
  LEEWAY_CHECK(to.table().size() == impl_->table.size(), "gradients of another model");
  for (size_t i = 0; i < impl_->table.size(); ++i) {
    const Tensor& gradient = impl_->parameters[i].grad();
    Tensor host = host_view(to.of(i), impl_->table[i].shape);
    if (gradient.defined()) {
      host.copy_(gradient);
    } else {
      host.zero_();
    }
  }
}

}  // namespace leeway
