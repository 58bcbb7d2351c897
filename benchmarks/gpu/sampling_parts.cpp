// Where the time of a decode step goes: every operation of the sampling pass alone, the whole pass,
// and a step of the engine, for several numbers of sequences. Prints one JSON object a line.
//   gpu_sampling_parts [--model 0.6B|135M|8B|tiny] [--keys N] [--precision bf16|fp8]
//
// "any order": products of the layers by PyTorch, which may split their inputs, so that a row's
// bits depend on the rows beside it. They are ordinary launches, which wait for the kernel before
// them to end, where ours are launched early: what sets "any order" apart from the pass is both.
//
// In fp8: the operations that differ from those of bf16, for decode rows and for those of prompts,
// with the products of cuBLASLt beside ours.
//
// An operation is measured over all layers, captured as one CUDA graph and replayed, so that its
// time is the device's and each layer's weights come from memory as they do in a step.

#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <cstdlib>
#include <functional>
#include <map>

#include "../report.h"
#include "base/rng.h"
#include "cuda/products.h"
#include "engine/engine.h"
#include "torch/coded_operations.h"
#include "torch/cuda_tensors.h"
#include "torch/sampling_operations.h"
#include "torch/sampling_pass.h"
#include "torch/sampling_weights.h"
#include "torch/torch_sampling.h"

namespace leeway {
namespace {

using at::Tensor;

constexpr int kRounds = 7;

struct Shape {
  int64_t vocabulary, hidden, inner, layers, heads, kv_heads, head_dim;
  bool qk_norm;
};

ModelConfig config_of(const std::string& name) {
  static const std::map<std::string, Shape> kShapes{
      {"0.6B", {151936, 1024, 3072, 28, 16, 8, 128, true}},
      {"135M", {49152, 576, 1536, 30, 9, 3, 64, false}},
      {"8B", {151936, 4096, 12288, 36, 32, 8, 128, true}},
      {"tiny", {320, 64, 160, 2, 4, 2, 16, true}}};
  const auto found = kShapes.find(name);
  if (found == kShapes.end()) throw Error("--model " + name + ": 0.6B, 135M, 8B or tiny");
  const Shape& shape = found->second;
  ModelConfig config;
  config.vocab_size = shape.vocabulary;
  config.hidden_size = shape.hidden;
  config.intermediate_size = shape.inner;
  config.num_hidden_layers = shape.layers;
  config.num_attention_heads = shape.heads;
  config.num_key_value_heads = shape.kv_heads;
  config.head_dim = shape.head_dim;
  config.max_position_embeddings = 4096;
  config.rope_theta = 1e6;
  config.tie_word_embeddings = true;
  config.qk_norm = shape.qk_norm;
  return config;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void print(const std::string& name, int64_t rows,
           const std::vector<std::pair<const char*, double>>& fields) {
  JsonWriter json;
  json.begin_object().key("name").value(name).key("rows").value(static_cast<double>(rows));
  for (const auto& [key, value] : fields) json.key(key).value(value);
  std::printf("%s\n", json.end_object().text().c_str());
  std::fflush(stdout);
}

// Milliseconds of the device for `work`, captured and replayed.
double device_ms(const std::function<void()>& work) {
  const c10::cuda::CUDAStream stream = c10::cuda::getStreamFromPool();
  const c10::cuda::CUDAStreamGuard guard(stream);
  work();
  stream.synchronize();
  at::cuda::CUDAGraph graph;
  graph.capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
  work();
  graph.capture_end();
  cudaEvent_t begin, end;
  cudaEventCreate(&begin), cudaEventCreate(&end);
  std::vector<double> times;
  for (int round = -2; round < kRounds; ++round) {
    cudaEventRecord(begin, stream);
    graph.replay();
    cudaEventRecord(end, stream);
    cudaEventSynchronize(end);
    float ms = 0.0f;
    cudaEventElapsedTime(&ms, begin, end);
    if (round >= 0) times.push_back(static_cast<double>(ms));
  }
  cudaEventDestroy(begin), cudaEventDestroy(end);
  return median(times);
}

// A pass of `count` decode rows, each with `keys` keys before it.
class Pass {
 public:
  Pass(const ModelConfig& config, const SamplingWeights& weights, int64_t count, int64_t keys)
      : config_(config), weights_(weights), count_(count) {
    counts_ = {config.num_attention_heads, config.num_key_value_heads, config.head_dim};
    const int64_t pages = (keys + kBlockKeys) / kBlockKeys;
    const auto on = [](at::ScalarType type) { return at::device(at::kCUDA).dtype(type); };
    const auto numbers = [&](int64_t width) {
      return at::randn({count, width}, on(at::kBFloat16));
    };
    kv_ = at::zeros({2 * config.num_hidden_layers, count * pages, kBlockKeys, counts_.kv_heads,
                     counts_.head_dim},
                    on(at::kBFloat16));
    pages_ = kv_.unbind(0);
    const int64_t queries = counts_.query_heads * counts_.head_dim;
    x_ = numbers(config.hidden_size), h_ = numbers(config.hidden_size);
    delta_ = numbers(config.hidden_size), last_ = numbers(config.hidden_size);
    qkv_ = numbers(queries + 2 * counts_.kv_heads * counts_.head_dim);
    q_ = numbers(queries), attention_ = numbers(queries);
    gate_up_ = numbers(2 * config.intermediate_size), s_ = numbers(config.intermediate_size);
    logits_ = at::empty({count, config.vocab_size}, on(at::kFloat));
    // As in an engine, where the host reads them.
    sampled_ = at::empty({count, 4}, at::TensorOptions(at::kInt).pinned_memory(true));
    draw_space_ = at::empty({draw_workspace_size(config.vocab_size, count)}, on(at::kByte));
    space_ = at::empty(
        {attention_workspace_size(counts_, config.max_position_embeddings, at::kBFloat16)},
        on(at::kFloat));
    rows_.decode_rows = count;
    rows_.tokens = at::randint(config.vocab_size, {count}, on(at::kInt));
    rows_.positions = at::full({count}, keys, on(at::kInt));
    rows_.starts = at::arange(count, on(at::kInt)) * pages;
    rows_.blocks = at::randperm(count * pages, on(at::kInt));
    rows_.logit_rows = at::arange(count, on(at::kInt));
    rows_.draws = at::arange(count, on(at::kInt));
    rows_.inverse_temperatures = at::ones({count}, on(at::kFloat));
    rows_.uniforms = at::rand({count}, on(at::kDouble));
    cudaDeviceSynchronize();  // what is measured runs on another stream
  }

  void report() {
    embed_rows();
    measure(
        "embed", [&](size_t) { embed_rows(); }, false);
    measure("add_norm", [&](size_t i) { norm(weights_.layers[i].input_norm); });
    measure("qkv",
            [&](size_t i) { project(products_.get(), h_, weights_.layers[i].qkv_t, {}, qkv_); });
    measure("store_heads", [&](size_t i) { heads(i); });
    measure("attention", [&](size_t i) { attention(i); });
    measure("store_heads and attention", [&](size_t i) { heads_and_attention(i); });
    measure("o", [&](size_t i) {
      project(products_.get(), attention_, weights_.layers[i].o_t, {}, delta_);
    });
    measure("gate_up", [&](size_t i) {
      project(products_.get(), h_, weights_.layers[i].gate_up_t, {}, gate_up_);
    });
    measure("swiglu", [&](size_t) { swiglu_rows(gate_up_, s_); });
    measure("gate_up and swiglu", [&](size_t i) {
      project_gated(products_.get(), h_, weights_.layers[i].gate_up_t, gate_up_, s_);
    });
    measure("down",
            [&](size_t i) { project(products_.get(), s_, weights_.layers[i].down_t, {}, delta_); });
    measure(
        "last_norm", [&](size_t) { last_norm(); }, false);
    measure(
        "logits", [&](size_t) { project_wide(products_.get(), last_, weights_.head_t, logits_); },
        false);
    measure(
        "draw", [&](size_t) { draw(); }, false);
    print("pass", count_, {{"step_ms", device_ms([&] { all(); })}});
    apart_ = true;
    print("pass, gate_up and swiglu apart", count_, {{"step_ms", device_ms([&] { all(); })}});
    any_order_ = true;
    print("pass, any order", count_, {{"step_ms", device_ms([&] { all(); })}});
    any_order_ = apart_ = false;
  }

 private:
  // `each` is one layer's share; without layers it is in the step once.
  void measure(const char* name, const std::function<void(size_t)>& each, bool layers = true) {
    const size_t times = layers ? weights_.layers.size() : 4;
    const double ms = device_ms([&] {
      for (size_t i = 0; i < times; ++i) each(i);
    });
    const double one = ms / static_cast<double>(times);
    print(name, count_, {{"us", 1e3 * one}, {"step_ms", layers ? ms : one}});
  }

  void embed_rows() { embed(weights_.embedding, rows_, x_); }
  void norm(const Tensor& weight) { add_norm(x_, delta_, weight, config_.rms_norm_eps, h_); }
  void last_norm() {
    add_norm_of_logit_rows(x_, delta_, rows_, weights_.final_norm, config_.rms_norm_eps, last_);
  }
  void draw() { draw_rows(logits_, {last_, weights_.head}, rows_, draw_space_, sampled_); }
  void heads(size_t i) {
    store_heads(weights_.layers[i].heads, rows_, qkv_, q_, pages_[2 * i], pages_[2 * i + 1]);
  }
  void attention(size_t i) {
    attend(counts_, rows_, config_.max_position_embeddings, q_, pages_[2 * i], pages_[2 * i + 1],
           space_, attention_);
  }
  void heads_and_attention(size_t i) {
    store_and_attend(weights_.layers[i].heads, rows_, config_.max_position_embeddings, qkv_, q_,
                     pages_[2 * i], pages_[2 * i + 1], space_, attention_);
  }
  void layer(size_t i) {
    const SamplingLayer& layer = weights_.layers[i];
    norm(layer.input_norm);
    product(h_, layer.qkv_t, qkv_);
    heads_and_attention(i);
    product(attention_, layer.o_t, delta_);
    norm(layer.post_norm);
    if (apart_) {
      product(h_, layer.gate_up_t, gate_up_);
      swiglu_rows(gate_up_, s_);
    } else {
      project_gated(products_.get(), h_, layer.gate_up_t, gate_up_, s_);
    }
    product(s_, layer.down_t, delta_);
  }
  void product(const Tensor& x, const Tensor& weight_t, Tensor& y) {
    any_order_ ? void(at::mm_out(y, x, weight_t)) : project(products_.get(), x, weight_t, {}, y);
  }
  void finish() {
    last_norm();
    project_wide(products_.get(), last_, weights_.head_t, logits_);
    draw();
  }
  void all() {
    embed_rows();
    for (size_t i = 0; i < weights_.layers.size(); ++i) layer(i);
    finish();
  }

  const ModelConfig& config_;
  const SamplingWeights& weights_;
  bool apart_ = false;      // gate_up and swiglu in two steps
  bool any_order_ = false;  // products of the layers by PyTorch
  const int64_t count_;
  HeadCounts counts_;
  Tensor kv_, x_, h_, delta_, last_, qkv_, q_, attention_, gate_up_, s_, logits_, sampled_, space_,
      draw_space_;
  std::vector<Tensor> pages_;
  PassRows rows_;
  std::shared_ptr<cuda::Products> products_ = make_products(at::kCUDA);
};

// The operations of a pass of `count` rows in fp8.
class CodedPass {
 public:
  CodedPass(const ModelConfig& config, const SamplingWeights& weights, int64_t count)
      : config_(config), weights_(weights), count_(count) {
    const auto numbers = [&](int64_t width) {
      return at::randn({count, width}, at::device(at::kCUDA).dtype(at::kBFloat16));
    };
    const int64_t queries = config.num_attention_heads * config.head_dim;
    x_ = numbers(config.hidden_size), delta_ = numbers(config.hidden_size);
    attention_ = numbers(queries), gate_up_ = numbers(2 * config.intermediate_size);
    qkv_ = numbers(queries + 2 * config.num_key_value_heads * config.head_dim);
    hidden_ = coded(x_), queries_ = coded(attention_),
    inner_ = coded(numbers(config.intermediate_size));
    cudaDeviceSynchronize();  // what is measured runs on another stream
  }

  void report() {
    Tensor nothing;
    measure("add_norm, codes", [&](const SamplingLayer& layer) {
      add_norm_coded(x_, delta_, layer.input_norm, config_.rms_norm_eps, nothing, hidden_);
    });
    measure("attention, codes", [&](const SamplingLayer&) { code_rows(attention_, queries_); });
    measure("swiglu, codes",
            [&](const SamplingLayer&) { swiglu_rows_coded(gate_up_, nothing, inner_); });
    product("qkv", hidden_, &SamplingLayer::qkv_coded, qkv_);
    product("o", queries_, &SamplingLayer::o_coded, delta_);
    product("gate_up", hidden_, &SamplingLayer::gate_up_coded, gate_up_);
    product("down", inner_, &SamplingLayer::down_coded, delta_);
  }

 private:
  static CodedTensor coded(const Tensor& numbers) {
    CodedTensor to = empty_coded(numbers.size(0), numbers.size(1), at::kCUDA);
    code_rows(numbers, to);
    return to;
  }
  void measure(const std::string& name, const std::function<void(const SamplingLayer&)>& each) {
    const double ms = device_ms([&] {
      for (const SamplingLayer& layer : weights_.layers) each(layer);
    });
    const double one = ms / static_cast<double>(weights_.layers.size());
    print("fp8, " + name, count_, {{"us", 1e3 * one}, {"step_ms", ms}});
  }
  void product(const std::string& name, const CodedTensor& x, CodedTensor SamplingLayer::*weight,
               Tensor& y) {
    measure(name, [&](const SamplingLayer& layer) {
      project_coded(products_.get(), x, layer.*weight, Tensor(), y);
    });
    measure(name + ", cuBLASLt", [&](const SamplingLayer& layer) {
      cuda::Projection p;
      p.rows = count_, p.inputs = x.codes.size(1), p.outputs = y.size(1);
      p.x = data_of(x.codes), p.weight = data_of((layer.*weight).codes), p.y = data_of(y);
      p.x_scales = x.scales.data_ptr<float>();
      p.weight_scales = (layer.*weight).scales.data_ptr<float>();
      products_->project_codes_by_library(p, stream_of(y));
    });
  }

  const ModelConfig& config_;
  const SamplingWeights& weights_;
  const int64_t count_;
  Tensor x_, delta_, attention_, gate_up_, qkv_;
  CodedTensor hidden_, queries_, inner_;
  std::shared_ptr<cuda::Products> products_ = make_products(at::kCUDA);
};

// Decode steps of an engine around `keys` keys: what the host adds to the pass.
void report_engine(const ModelConfig& config, const Parameters& weights, int64_t rows,
                   int64_t keys) {
  constexpr int64_t kSteps = 48;
  EngineOptions options;
  options.max_sequences = rows;
  options.max_rows_per_step = 8192;
  options.kv_bytes = rows * (keys + kSteps + 16) * config.num_hidden_layers *
                     config.num_key_value_heads * config.head_dim * 2 * 2;
  options.backend = make_torch_sampling(at::kCUDA, at::kBFloat16);
  Engine engine(weights, 0, options);
  Rng rng(3);
  for (int64_t i = 0; i < rows; ++i) {
    std::vector<int32_t> prompt(static_cast<size_t>(keys - kSteps / 2));
    for (int32_t& id : prompt) {
      id = static_cast<int32_t>(rng.below(static_cast<uint64_t>(config.vocab_size)));
    }
    engine.submit({.prompt = std::move(prompt), .max_new_tokens = kSteps});
  }
  std::vector<double> times, prefill;
  while (!engine.idle()) {
    StepReport report;
    const double seconds = seconds_of([&] { report = engine.step(); });
    (report.prompt_rows == 0 ? times : prefill).push_back(1e3 * seconds);
  }
  double prefill_ms = 0.0;
  for (const double ms : prefill) prefill_ms += ms;
  times.erase(times.begin(), times.begin() + 3);  // captures
  print("engine step", rows, {{"step_ms", median(times)}, {"all_prefill_ms", prefill_ms}});
}

void run(int argc, char** argv) {
  std::string model = "0.6B";
  int64_t keys = 192;
  bool fp8 = false;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    if (name == "--model") model = argv[i + 1];
    if (name == "--keys") keys = std::atoll(argv[i + 1]);
    if (name == "--precision") fp8 = std::string(argv[i + 1]) == "fp8";
  }
  const c10::InferenceMode inference;
  const ModelConfig config = config_of(model);
  if (fp8) {
    const SamplingWeights weights(config, at::kCUDA, at::kBFloat16, {.fp8 = true});
    for (const int64_t rows : {8, 32, 64, 128, 256, 1024, 8192}) {
      CodedPass(config, weights, rows).report();
    }
    return;
  }
  {
    const SamplingWeights weights(config, at::kCUDA, at::kBFloat16);
    for (const int64_t rows : {32, 256, 1024}) Pass(config, weights, rows, keys).report();
  }
  const Parameters weights(config);
  for (const int64_t rows : {32, 256, 1024}) report_engine(config, weights, rows, keys);
}

}  // namespace
}  // namespace leeway

int main(int argc, char** argv) {
  try {
    leeway::run(argc, argv);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}
