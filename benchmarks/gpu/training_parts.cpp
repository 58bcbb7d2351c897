// Where the time of a training pass goes: the operations of the trunk (src/torch/trunk.h), each
// timed alone on the shapes of Qwen3's 0.6 billion parameters, 8 x 2048 tokens. Prints one JSON
// object a line: milliseconds of one call, and of all calls of a pass with its gradient. Names with
// "any order" are what a mode would run that need not have the sampler's bits: PyTorch's own
// products, which may split their inputs, and cuDNN's forward attention.

#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAEvent.h>
#include <torch/version.h>

#include <cstdio>
#include <memory>

#include "torch/flat_adamw.h"
#include "torch/training_operations.h"

namespace leeway {
namespace {

using at::Tensor;

constexpr int64_t kRows = 16384, kHidden = 1024, kInner = 3072, kLayers = 28;
constexpr int64_t kQueryHeads = 16, kKvHeads = 8, kHeadDim = 128;
constexpr int64_t kQueries = kQueryHeads * kHeadDim;
constexpr int64_t kQkv = kQueries + 2 * kKvHeads * kHeadDim;

template <class Work>
void report(const char* name, int64_t calls, Work&& work) {
  constexpr int kRounds = 10;
  work();
  at::cuda::CUDAEvent begin(cudaEventDefault), end(cudaEventDefault);
  begin.record();
  for (int i = 0; i < kRounds; ++i) work();
  end.record();
  end.synchronize();
  const double each = begin.elapsed_time(end) / kRounds;
  std::printf("{\"name\": \"%s\", \"ms\": %.4f, \"calls\": %lld, \"pass_ms\": %.2f}\n", name, each,
              static_cast<long long>(calls), each * static_cast<double>(calls));
  std::fflush(stdout);
}

std::vector<int64_t> offsets_of(const std::vector<int64_t>& lengths) {
  std::vector<int64_t> offsets = {0};
  for (const int64_t length : lengths) offsets.push_back(offsets.back() + length);
  return offsets;
}

void attention_parts(cuda::AttentionGradients* prepared, const ModelConfig& config,
                     const char* name, const std::vector<int64_t>& lengths, const Tensor& q,
                     const Tensor& k, const Tensor& v) {
  const PackedSequences sequences(config, offsets_of(lengths), kRows, q.device());
  const Attended attended = attention(sequences, q, k, v);
  const Tensor d_out = at::randn_like(q);
  const std::string label = std::string("attention, ") + name;
  report(label.c_str(), kLayers, [&] { attention(sequences, q, k, v); });
  report((label + ", gradient").c_str(), kLayers,
         [&] { attention_backward(prepared, sequences, q, k, v, attended, d_out); });
}

// Sequences of one length, by cuDNN's forward attention.
void attention_in_any_order(const std::vector<int64_t>& lengths, const Tensor& q, const Tensor& k,
                            const Tensor& v) {
#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 9)
  // [sequences x length, heads, head_dim] as [sequences, heads, length, head_dim].
  const auto heads_first = [&](const Tensor& rows) {
    return rows.unflatten(0, {static_cast<int64_t>(lengths.size()), lengths[0]}).transpose(1, 2);
  };
  const Tensor queries = heads_first(q), keys = heads_first(k), values = heads_first(v);
  report("attention, even lengths, any order", kLayers, [&] {
    at::_scaled_dot_product_cudnn_attention(queries, keys, values, {}, /*compute_log_sumexp=*/true,
                                            0.0, /*is_causal=*/true);
  });
#else
  (void)lengths, (void)q, (void)k, (void)v;
#endif
}

void run() {
  const c10::InferenceMode inference;
  const at::Device device(at::kCUDA, 0);
  const at::TensorOptions half = at::device(device).dtype(at::kBFloat16);
  const at::TensorOptions full = half.dtype(at::kFloat);
  ModelConfig config;
  config.num_attention_heads = kQueryHeads, config.num_key_value_heads = kKvHeads;
  config.head_dim = kHeadDim, config.hidden_size = kHidden, config.intermediate_size = kInner;
  config.max_position_embeddings = 4096;
  const HeadWeights heads{{kQueryHeads, kKvHeads, kHeadDim},
                          at::ones({kHeadDim}, half),
                          at::ones({kHeadDim}, half),
                          1e-6,
                          TorchRopeTable(config, device)};
  const std::vector<int64_t> even(8, 2048);
  const PackedSequences sequences(config, offsets_of(even), kRows, device);

  const std::shared_ptr<cuda::Products> products = make_products(device);
  struct Matrix {
    const char* name;
    int64_t outputs, inputs;
  };
  for (const auto& [name, outputs, inputs] :
       {Matrix{"qkv", kQkv, kHidden}, Matrix{"o", kHidden, kQueries},
        Matrix{"gate_up", 2 * kInner, kHidden}, Matrix{"down", kHidden, kInner}}) {
    const Tensor x = at::randn({kRows, inputs}, half), w = at::randn({outputs, inputs}, half);
    const Tensor d_y = at::randn({kRows, outputs}, half), d_w = at::zeros({outputs, inputs}, full);
    Tensor y = at::empty({kRows, outputs}, half), d_x = at::empty({kRows, inputs}, half);
    const std::string label = std::string("product, ") + name;
    report(label.c_str(), kLayers, [&] { project(products.get(), x, w.t(), Tensor(), y); });
    report((label + ", any order").c_str(), kLayers, [&] { at::mm_out(y, x, w.t()); });
    report((label + ", gradient of x").c_str(), kLayers,
           [&] { project(products.get(), d_y, w, Tensor(), d_x); });
    report((label + ", gradient of x, any order").c_str(), kLayers,
           [&] { at::mm_out(d_x, d_y, w); });
    report((label + ", gradient of w").c_str(), kLayers,
           [&] { weight_gradient(d_y, x, d_w, true); });
    report((label + ", gradient of w, added").c_str(), kLayers,
           [&] { weight_gradient(d_y, x, d_w, false); });
  }

  const Tensor qkv = at::randn({kRows, kQkv}, half);
  const auto [q, k] = pack_heads(heads, sequences.positions, qkv);
  const Tensor v = values_of(heads, qkv);
  const HeadGradients d_heads{at::randn_like(q), at::randn_like(k), at::randn(k.sizes(), half)};
  const Tensor d_norm = at::zeros({kHeadDim}, full);
  report("rows, heads", 2 * kLayers, [&] { pack_heads(heads, sequences.positions, qkv); });
  report("rows, heads, gradient", kLayers,
         [&] { heads_backward(heads, sequences.positions, qkv, d_heads, d_norm, d_norm); });
  const auto prepared = make_attention_gradients(device);
  const std::vector<int64_t> uneven = {512, 950, 1389, 1828, 2268, 2707, 3146, 3584};
  attention_parts(prepared.get(), config, "even lengths", even, q, k, v);
  attention_parts(prepared.get(), config, "uneven lengths", uneven, q, k, v);

  const Tensor x = at::randn({kRows, kHidden}, half), delta = at::randn({kRows, kHidden}, half);
  const Tensor weight = at::ones({kHidden}, half), d_weight = at::zeros({kHidden}, full);
  Tensor h = at::empty_like(x), d = at::randn_like(x);
  report("rows, norm of a sum", 2 * kLayers, [&] { sum_and_norm(x, delta, weight, 1e-6, h); });
  report("rows, norm again and its gradient", 2 * kLayers,
         [&] { norm_backward(x, weight, 1e-6, delta, d, d_weight, h); });
  const Tensor gate_up = at::randn({kRows, 2 * kInner}, half);
  Tensor s = at::empty({kRows, kInner}, half);
  report("rows, swiglu", kLayers, [&] { swiglu_rows(gate_up, s); });
  report("rows, swiglu, gradient", kLayers, [&] { swiglu_backward(gate_up, s); });
  const Tensor ids = at::randint(151936, {kRows}, half.dtype(at::kInt));
  const Tensor d_table = at::zeros({151936, kHidden}, full);
  report("rows, embedding, gradient", 1, [&] { embed_backward(ids, x, d_table); });

  FlatAdamW step;
  const int64_t parameters = int64_t{596} << 20;
  step.parameters = at::zeros({parameters}, full), step.gradients = at::ones({parameters}, full);
  step.moments.first = at::zeros({parameters}, full);
  step.moments.second = at::zeros({parameters}, full);
  step.copy = at::zeros({parameters}, half), step.decaying = parameters;
  report("optimizer", 1, [&] { adamw_step(step, OptimizerTable(), 1, 1e-6, 1.0); });
  report("norm of the gradient", 1, [&] { norm_of(step.gradients); });
  attention_in_any_order(even, q, k, v);
}

}  // namespace
}  // namespace leeway

int main() {
  try {
    leeway::run();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}
