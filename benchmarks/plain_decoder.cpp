#include "plain_decoder.h"

#include <dlfcn.h>
#include <torch/torch.h>

#include <chrono>
#include <cmath>

namespace leeway {

using torch::Tensor;

namespace {

struct PlainLayer {
  Tensor input_norm, q, k, v, q_norm, k_norm, o, post_norm, gate, up, down;
};

// KV cache of one layer, [rows, kv_heads, positions, head_dim].
struct PlainCache {
  Tensor keys, values;
};

Tensor norm(const Tensor& x, const Tensor& weight, double eps) {
  return x * torch::rsqrt(x.square().mean(-1, true) + eps) * weight;
}

// x [.., head_dim]; cosines and sines broadcast over its heads.
Tensor rotate(const Tensor& x, const Tensor& cosines, const Tensor& sines) {
  const std::vector<Tensor> halves = x.chunk(2, -1);
  return torch::cat(
      {halves[0] * cosines - halves[1] * sines, halves[1] * cosines + halves[0] * sines}, -1);
}

template <class T>
Tensor view_of(const std::vector<T>& values, at::IntArrayRef shape, torch::ScalarType type) {
  return torch::from_blob(const_cast<T*>(values.data()), shape, torch::TensorOptions(type));
}

}  // namespace

struct PlainDecoder::Impl {
  ModelConfig config;
  std::vector<Tensor> parameters;
  Tensor embedding, final_norm, head, cosines, sines;
  std::vector<PlainLayer> layers;

  // Zero where a query sees a key and -infinity elsewhere, for `groups` query heads that share a
  // key head and are stacked.
  Tensor causal_mask(int64_t length) const {
    const int64_t groups = config.num_attention_heads / config.num_key_value_heads;
    return torch::full({length, length}, -INFINITY).triu(1).repeat({groups, 1});
  }

  // From tokens [B, T] at positions `start` .. to hidden states [B, T, hidden_size]. `mask` is
  // undefined for a single token, which sees everything.
  Tensor body(const Tensor& tokens, int64_t start, const Tensor& mask,
              std::vector<PlainCache>* caches, Cache kind) const {
    const int64_t batch = tokens.size(0), length = tokens.size(1), dim = config.head_dim;
    const int64_t kv_heads = config.num_key_value_heads;
    const int64_t groups = config.num_attention_heads / kv_heads;
    const Tensor cosine = cosines.narrow(0, start, length).view({length, 1, 1, dim / 2});
    const Tensor sine = sines.narrow(0, start, length).view({length, 1, 1, dim / 2});
    const Tensor kv_cosine = cosine.squeeze(1), kv_sine = sine.squeeze(1);
    const double scale = 1.0 / std::sqrt(static_cast<double>(dim));

    Tensor x = torch::embedding(embedding, tokens);
    for (size_t l = 0; l < layers.size(); ++l) {
      const PlainLayer& w = layers[l];
      const Tensor h = norm(x, w.input_norm, config.rms_norm_eps);
      Tensor q = torch::linear(h, w.q).view({batch, length, kv_heads, groups, dim});
      Tensor k = torch::linear(h, w.k).view({batch, length, kv_heads, dim});
      Tensor v = torch::linear(h, w.v).view({batch, length, kv_heads, dim}).transpose(1, 2);
      if (config.qk_norm) {
        q = norm(q, w.q_norm, config.rms_norm_eps);
        k = norm(k, w.k_norm, config.rms_norm_eps);
      }
      // Query heads of a group become rows of one matrix, so keys and values need not be repeated.
      q = (rotate(q, cosine, sine) * scale)
              .permute({0, 2, 3, 1, 4})
              .reshape({batch, kv_heads, groups * length, dim});
      k = rotate(k, kv_cosine, kv_sine).transpose(1, 2);
      if (caches != nullptr) {
        PlainCache& cache = (*caches)[l];
        if (kind == Cache::preallocated) {
          cache.keys.narrow(2, start, length).copy_(k);
          cache.values.narrow(2, start, length).copy_(v);
          k = cache.keys.narrow(2, 0, start + length);
          v = cache.values.narrow(2, 0, start + length);
        } else {
          if (start > 0) {
            k = torch::cat({cache.keys, k}, 2);
            v = torch::cat({cache.values, v}, 2);
          }
          cache = {k, v};
        }
      }
      Tensor scores = torch::matmul(q, k.transpose(2, 3));
      if (mask.defined()) scores.add_(mask);
      const Tensor attended = torch::matmul(torch::softmax(scores, -1), v)
                                  .view({batch, kv_heads, groups, length, dim})
                                  .permute({0, 3, 1, 2, 4})
                                  .reshape({batch, length, config.num_attention_heads * dim});
      x = x + torch::linear(attended, w.o);
      const Tensor m = norm(x, w.post_norm, config.rms_norm_eps);
      x = x + torch::linear(torch::silu(torch::linear(m, w.gate)) * torch::linear(m, w.up), w.down);
    }
    return norm(x, final_norm, config.rms_norm_eps);
  }
};

PlainDecoder::PlainDecoder(const Parameters& weights) : impl_(std::make_unique<Impl>()) {
  Impl& impl = *impl_;
  impl.config = weights.config();
  auto leaf = [&](const std::string& name) -> Tensor {
    for (size_t i = 0; i < weights.table().size(); ++i) {
      if (weights.table()[i].name == name) return impl.parameters[i];
    }
    return {};
  };
  for (size_t i = 0; i < weights.table().size(); ++i) {
    impl.parameters.push_back(
        torch::from_blob(const_cast<float*>(weights.of(i).data()), weights.table()[i].shape)
            .clone()
            .requires_grad_());
  }
  impl.embedding = leaf("model.embed_tokens.weight");
  impl.final_norm = leaf("model.norm.weight");
  impl.head = impl.config.tie_word_embeddings ? impl.embedding : leaf("lm_head.weight");
  for (int64_t l = 0; l < impl.config.num_hidden_layers; ++l) {
    const std::string at = "model.layers." + std::to_string(l) + ".";
    const std::string self = at + "self_attn.", mlp = at + "mlp.";
    impl.layers.push_back(
        {leaf(at + "input_layernorm.weight"), leaf(self + "q_proj.weight"),
         leaf(self + "k_proj.weight"), leaf(self + "v_proj.weight"), leaf(self + "q_norm.weight"),
         leaf(self + "k_norm.weight"), leaf(self + "o_proj.weight"),
         leaf(at + "post_attention_layernorm.weight"), leaf(mlp + "gate_proj.weight"),
         leaf(mlp + "up_proj.weight"), leaf(mlp + "down_proj.weight")});
  }
  const int64_t dim = impl.config.head_dim;
  const Tensor frequencies =
      1.0 / torch::pow(impl.config.rope_theta,
                       torch::arange(0, dim, 2, torch::kFloat32) / static_cast<double>(dim));
  const Tensor angles =
      torch::arange(impl.config.max_position_embeddings, torch::kFloat32).unsqueeze(1) *
      frequencies;
  impl.cosines = angles.cos();
  impl.sines = angles.sin();
}

PlainDecoder::~PlainDecoder() = default;

std::string PlainDecoder::libtorch_version() { return TORCH_VERSION; }

void PlainDecoder::set_threads(int aten, int blas) {
  at::set_num_threads(aten);
  // Set after ATen, which also sets the threads of the BLAS it was built with.
  if (void* set = dlsym(RTLD_DEFAULT, "openblas_set_num_threads")) {
    reinterpret_cast<void (*)(int)>(set)(blas);
  }
}

double PlainDecoder::product_seconds(int64_t n) {
  const torch::InferenceMode guard;
  const Tensor a = torch::rand({n, n}), b = torch::rand({n, n});
  Tensor c = torch::mm(a, b);
  const auto begin = std::chrono::steady_clock::now();
  torch::mm_out(c, a, b);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

double PlainDecoder::train(std::span<const PaddedBatch> micro_batches, double denominator) {
  Impl& impl = *impl_;
  for (Tensor& parameter : impl.parameters) parameter.mutable_grad().reset();
  double total = 0.0;
  for (const PaddedBatch& batch : micro_batches) {
    const std::vector<int64_t> shape = {batch.rows, batch.columns};
    const Tensor tokens = view_of(batch.tokens, shape, torch::kInt64);
    const Tensor targets = view_of(batch.targets, shape, torch::kInt64).unsqueeze(2);
    const Tensor rollout = view_of(batch.rollout, shape, torch::kFloat32);
    const Tensor advantages = view_of(batch.advantages, shape, torch::kFloat32);
    const Tensor mask = view_of(batch.mask, shape, torch::kUInt8).to(torch::kBool);

    const Tensor hidden =
        impl.body(tokens, 0, impl.causal_mask(batch.columns), nullptr, Cache::concatenated);
    const Tensor logprobs =
        torch::log_softmax(torch::linear(hidden, impl.head), -1).gather(2, targets).squeeze(2);
    const Tensor ratio = torch::exp(logprobs - rollout);
    const Tensor keep = mask & (ratio >= 0.2) & (ratio <= 5.0);
    const Tensor loss = -(keep * advantages * ratio).sum() / denominator;
    loss.backward();
    total += loss.item<double>();
  }
  return total;
}

void PlainDecoder::copy_gradients_to(Parameters& to) const {
  for (size_t i = 0; i < impl_->parameters.size(); ++i) {
    torch::from_blob(to.of(i).data(), to.table()[i].shape).copy_(impl_->parameters[i].grad());
  }
}

PlainDecoder::Sampled PlainDecoder::sample(std::span<const int64_t> prompts, int64_t rows,
                                           int64_t new_tokens, Cache cache) {
  const torch::InferenceMode guard;
  const Impl& impl = *impl_;
  const ModelConfig& config = impl.config;
  const int64_t prompt = static_cast<int64_t>(prompts.size()) / rows;
  std::vector<PlainCache> caches(impl.layers.size());
  if (cache == Cache::preallocated) {
    for (PlainCache& layer : caches) {
      layer.keys =
          torch::empty({rows, config.num_key_value_heads, prompt + new_tokens, config.head_dim});
      layer.values = torch::empty_like(layer.keys);
    }
  }
  std::vector<Tensor> ids, logprobs;
  Tensor tokens = torch::from_blob(const_cast<int64_t*>(prompts.data()), {rows, prompt},
                                   torch::TensorOptions(torch::kInt64));
  Tensor mask = impl.causal_mask(prompt);
  for (int64_t start = 0; start < prompt + new_tokens - 1; start += tokens.size(1)) {
    if (start > 0) tokens = ids.back();
    const Tensor hidden = impl.body(tokens, start, mask, &caches, cache);
    const Tensor probabilities =
        torch::softmax(torch::linear(hidden.select(1, tokens.size(1) - 1), impl.head), -1);
    ids.push_back(torch::multinomial(probabilities, 1));
    logprobs.push_back(probabilities.gather(1, ids.back()).log());
    mask = Tensor();
  }
  const Tensor all_ids = torch::cat(ids, 1).contiguous();
  const Tensor all_logprobs = torch::cat(logprobs, 1).contiguous();
  Sampled sampled;
  sampled.ids.assign(all_ids.data_ptr<int64_t>(), all_ids.data_ptr<int64_t>() + all_ids.numel());
  sampled.logprobs.assign(all_logprobs.data_ptr<float>(),
                          all_logprobs.data_ptr<float>() + all_logprobs.numel());
  return sampled;
}

}  // namespace leeway
