#include "torch/torch_sampling.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <utility>

#include "engine/checks.h"
#include "engine/host_draws.h"
#include "leeway/error.h"
#include "model/gpu_sizes.h"
#include "torch/coded_operations.h"
#include "torch/device_weights.h"
#include "torch/low_rank.h"
#include "torch/part_stream.h"
#include "torch/sampling_operations.h"
#include "torch/sampling_pass.h"
#include "torch/sampling_weights.h"
#include "torch/torch_errors.h"

#ifdef LEEWAY_CUDA
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace leeway {

using at::Tensor;

namespace {

// What the host needs to draw tokens itself, created on first use.
struct HostSide {
  explicit HostSide(int threads) : pool(threads), draws(pool) {}
  ThreadPool pool;
  HostDraws draws;
};

class TorchSampling final : public SamplingBackend {
 public:
  TorchSampling(const ModelConfig& config, const EngineOptions& options, int64_t most_blocks,
                torch::Device device, torch::ScalarType compute, TorchSamplingOptions own);

  int64_t blocks() const override { return blocks_; }
  int64_t block_bytes() const override { return block_bytes_; }
  void check(const PolicySnapshot& weights) const override;
  void load(const PolicySnapshot& weights) override;
  void run(const StepRows& pass, std::vector<Drawn>& drawn) override;
  void copy_blocks(std::span<const BlockCopy> copies) override;

 private:
  // While it lives, the calling thread records no gradients and queues its work on the backend's
  // own stream, in parallel to a trainer's.
  struct Scope {
    explicit Scope(const TorchSampling& backend);
    c10::InferenceMode inference;
#ifdef LEEWAY_CUDA
    c10::cuda::OptionalCUDAStreamGuard stream;
#endif
  };

  at::TensorOptions of_type(at::ScalarType type) const { return at::device(device_).dtype(type); }
  void make_tensors();
  void reserve(const PassShape& shape);
  void forward(const PassShape& shape);
  bool replay(const PassShape& shape);
  void wait();
  void take_drawn(const StepRows& pass, std::vector<Drawn>& drawn);
  using HostFunction = void (HostDraws::*)(std::span<const Draw>, const float*, int64_t,
                                           std::span<Drawn>);
  void on_host(const StepRows& pass, const std::vector<size_t>& places, HostFunction function,
               std::vector<Drawn>& drawn);

  const ModelConfig config_;
  const torch::Device device_;
  const torch::ScalarType compute_;
  const TorchSamplingOptions own_;
  const int threads_;
  const bool at_once_;                    // memory for all weights is taken before they come
  const int64_t most_rows_, most_draws_;  // of a pass
  const HeadCounts counts_;
  const int64_t block_bytes_, blocks_;
#ifdef LEEWAY_CUDA
  std::optional<c10::cuda::CUDAStream> stream_;
  struct Graph {
    bool seen = false;
    std::unique_ptr<at::cuda::CUDAGraph> graph;
  };
  std::map<int64_t, Graph> graphs_;  // by the number of rows
#endif
  const std::shared_ptr<cuda::Products> products_;

  std::optional<SamplingWeights> weights_;  // made with the tensors that follow
  Tensor kv_;                               // [2 layers, blocks, 16, kv_heads, head_dim]
  std::vector<Tensor> pages_;               // its views: keys of a layer, values of it, ..
  Tensor attention_space_;

  // A pass's tensors have the first dimension `rows_room_`, the last line `draws_room_`. They grow
  // as needed; graphs are captured on them and on `integers_`, and are discarded when these move.
  int64_t rows_room_ = 0, draws_room_ = 0;
  Tensor x_, h_, qkv_, q_, attention_, delta_, gate_up_, s_, low_;
  CodedTensor coded_;  // in fp8: of the input of the next product, whatever its width
  Tensor last_x_, last_, logits_, draw_space_;
  Tensor sampled_;  // on the host; pinned where the device is CUDA, which writes into it
  PassIntegers integers_;

  std::vector<Rng> rng_before_;  // [draws]
  std::unique_ptr<HostSide> host_;
  std::vector<Draw> host_draws_;
  std::vector<Drawn> host_drawn_;
};

// Before anything is asked of the device.
void check_device(torch::Device device, torch::ScalarType compute, const ModelConfig& config,
                  bool fp8) {
  if (compute != at::kFloat && compute != at::kBFloat16) {
    throw Error(fmt::format("sampling in {}: the compute type is float32 or bfloat16",
                            c10::toString(compute)));
  }
  if (fp8) {
    LEEWAY_CHECK(compute == at::kBFloat16, "fp8 is beside bf16");
    check_sizes_for_fp8(config);
  }
  if (!device.is_cuda()) return;
  if (const std::string why = why_gpu_cannot_sample(config); !why.empty()) {
    throw Error(why + "; use the CPU");
  }
#ifdef LEEWAY_CUDA
  if (!at::hasCUDA()) throw Error(fmt::format("device {}: no GPU was found", device.str()));
  const cudaDeviceProp* properties = at::cuda::getDeviceProperties(device.index());
  if (fp8 && 10 * properties->major + properties->minor < 89) {
    throw Error(fmt::format(
        "precision fp8: {} has no products in fp8, which begin with compute capability 8.9; use "
        "bf16 (rollout.precision, --precision)",
        properties->name));
  }
#else
  throw Error(fmt::format("device {}: this build has no CUDA", device.str()));
#endif
}

TorchSampling::Scope::Scope([[maybe_unused]] const TorchSampling& backend) {
#ifdef LEEWAY_CUDA
  if (backend.stream_) stream.reset_stream(*backend.stream_);
#endif
}

TorchSampling::TorchSampling(const ModelConfig& config, const EngineOptions& options,
                             int64_t most_blocks, torch::Device device, torch::ScalarType compute,
                             TorchSamplingOptions own)
    : config_(config),
      device_(device),
      compute_(compute),
      own_(own),
      threads_(options.threads),
      at_once_(options.frozen == FrozenWeights::packed),
      most_rows_(options.max_rows_per_step),
      most_draws_(options.max_sequences),
      counts_{config.num_attention_heads, config.num_key_value_heads, config.head_dim},
      block_bytes_(2 * config.num_hidden_layers * kBlockKeys * counts_.kv_heads * counts_.head_dim *
                   static_cast<int64_t>(c10::elementSize(compute))),
      blocks_(block_count(options, block_bytes_, most_blocks)),
      products_(make_products(device)),
      integers_(device) {
#ifdef LEEWAY_CUDA
  if (device_.is_cuda()) {
    // Its kernels are small and wait for each other: beside a trainer's large ones they go first.
    stream_ = c10::cuda::getStreamFromPool(/*isHighPriority=*/true, device_.index());
  }
#endif
  const Scope scope(*this);
  try {
    make_tensors();
  } catch (const c10::Error& error) {
    throw Error(fmt::format(
        "{} blocks of {} bytes for keys and values (kv_bytes is {}) and the weights do not fit {}: "
        "lower kv_bytes ({})",
        blocks_, block_bytes_, options.kv_bytes, device_.str(), error.what_without_backtrace()));
  }
}

void TorchSampling::make_tensors() {
  weights_.emplace(config_, device_, compute_,
                   SamplingWeights::Options{.at_once = at_once_, .fp8 = own_.fp8});
  kv_ = at::empty(
      {2 * config_.num_hidden_layers, blocks_, kBlockKeys, counts_.kv_heads, counts_.head_dim},
      of_type(compute_));
  pages_ = kv_.unbind(0);
  attention_space_ =
      at::empty({attention_workspace_size(counts_, config_.max_position_embeddings, compute_)},
                of_type(at::kFloat));
}

void TorchSampling::check(const PolicySnapshot& weights) const {
  const auto* there = dynamic_cast<const TorchDeviceWeights*>(weights.device());
  if (there != nullptr) {
    if (there->layout().lora) check_rank(there->layout().lora->rank, device_);
  } else if (const LoraSettings* lora = weights.host().lora()) {
    check_rank(lora->rank, device_);
  }
}

void TorchSampling::load(const PolicySnapshot& weights) {
  with_plain_errors([&] {
    const Scope scope(*this);
    const auto* there = dynamic_cast<const TorchDeviceWeights*>(weights.device());
    if (there != nullptr ? weights_->load(*there) : weights_->load(weights.host())) {
      rows_room_ = 0;  // other tensors, perhaps of another rank: a pass's are made again
    }
    if (there != nullptr) wait();  // the copies are read from the snapshot's memory, which may go
  });
}

// ---------------------------------------------------------------------------------------------
// A pass

void TorchSampling::reserve(const PassShape& shape) {
  const auto room = [](int64_t have, int64_t wanted, int64_t most) {
    return std::max(wanted, std::min(2 * have, filled_up(most)));
  };
  bool moved = integers_.reserve(shape);
  if (shape.rows > rows_room_) {
    rows_room_ = room(rows_room_, shape.rows, most_rows_);
    const auto make = [&](Tensor& tensor, int64_t width) {
      tensor = Tensor();  // free its memory before allocating the new one
      tensor = at::empty({rows_room_, width}, of_type(compute_));
    };
    const int64_t queries = counts_.query_heads * counts_.head_dim;
    make(x_, config_.hidden_size);
    make(h_, config_.hidden_size);
    make(qkv_, queries + 2 * counts_.kv_heads * counts_.head_dim);
    make(q_, queries);
    make(attention_, queries);
    make(delta_, config_.hidden_size);
    make(gate_up_, 2 * config_.intermediate_size);
    make(s_, config_.intermediate_size);
    make(low_, weights_->low_width);
    if (own_.fp8) {
      coded_ = {};
      const int64_t widest = std::max({config_.hidden_size, queries, config_.intermediate_size});
      coded_ = empty_coded(rows_room_, widest, device_);
    }
    moved = true;
  }
  const int64_t draws = std::max(shape.draws, shape.logit_rows);
  if (draws > draws_room_) {
    draws_room_ = room(draws_room_, draws, most_draws_);
    last_x_ = last_ = logits_ = draw_space_ = sampled_ = Tensor();
    last_x_ = at::empty({draws_room_, config_.hidden_size}, of_type(compute_));
    last_ = at::empty({draws_room_, config_.hidden_size}, of_type(compute_));
    // Rows are aligned as those of a trainer's head.
    logits_ = at::empty({draws_room_, (config_.vocab_size + 63) / 64 * 64}, of_type(at::kFloat))
                  .narrow(1, 0, config_.vocab_size);
    draw_space_ =
        at::empty({draw_workspace_size(config_.vocab_size, draws_room_)}, of_type(at::kByte));
    sampled_ =
        at::empty({draws_room_, 4}, at::TensorOptions(at::kInt).pinned_memory(device_.is_cuda()));
    moved = true;
  }
#ifdef LEEWAY_CUDA
  if (moved) graphs_.clear();
#else
  static_cast<void>(moved);
#endif
}

void TorchSampling::forward(const PassShape& shape) {
  const PassRows rows = integers_.rows(shape);
  const auto first = [](const Tensor& tensor, int64_t count) { return tensor.narrow(0, 0, count); };
  Tensor x = first(x_, shape.rows), h = first(h_, shape.rows), qkv = first(qkv_, shape.rows);
  Tensor q = first(q_, shape.rows), attention = first(attention_, shape.rows);
  Tensor delta = first(delta_, shape.rows), gate_up = first(gate_up_, shape.rows);
  Tensor s = first(s_, shape.rows);
  const double eps = config_.rms_norm_eps;
  const AdapterTensors& adapter = weights_->adapter;
  // y += what the adapter makes of `from`, if there is one.
  const auto add_update = [&](size_t layer, LowRankStack LayerAdapter::*of, const Tensor& from,
                              Tensor& y) {
    if (adapter.layers.empty()) return;
    const LowRankStack& stack = adapter.layers[layer].*of;
    if (!stack.a.defined()) return;
    Tensor low = low_.view({-1}).narrow(0, 0, from.size(0) * stack.a.size(0));
    low = low.view({from.size(0), stack.a.size(0)});
    add_low_rank(products_.get(), stack, adapter.scale, from, low, y);
  };
  // In fp8 a product's input is made codes on the way to it, and its numbers are for an adapter.
  const bool fp8 = own_.fp8;
  Tensor nothing;
  const auto norm = [&](const Tensor& added, const Tensor& weight) {
    if (!fp8) return add_norm(x, added, weight, eps, h);
    CodedTensor coded = first_coded(coded_, x.size(0), x.size(1));
    add_norm_coded(x, added, weight, eps, adapter.layers.empty() ? nothing : h, coded);
  };
  const auto multiply = [&](const Tensor& from, const Tensor& transposed, const CodedTensor& codes,
                            const Tensor& bias, Tensor& y) {
    if (!fp8) return project(products_.get(), from, transposed, bias, y);
    project_coded(products_.get(), first_coded(coded_, from.size(0), from.size(1)), codes, bias, y);
  };
  // Prompts: of their last layer most rows are keys and values alone.
  const bool trims = 2 * shape.logit_rows <= shape.rows;

  // x is the residual stream without `delta`, which the next norm adds.
  embed(weights_->embedding, rows, x);
  for (size_t i = 0; i < weights_->layers.size(); ++i) {
    const SamplingLayer& layer = weights_->layers[i];
    const bool last = i + 1 == weights_->layers.size();
    Tensor &keys = pages_[2 * i], &values = pages_[2 * i + 1];
    norm(i == 0 ? Tensor() : delta, layer.input_norm);
    multiply(h, layer.qkv_t, layer.qkv_coded, layer.qkv_bias, qkv);
    add_update(i, &LayerAdapter::qkv, h, qkv);
    if (last && shape.logit_rows == 0) {
      return store_heads(layer.heads, rows, qkv, q, keys, values);
    }
    store_and_attend(layer.heads, rows, config_.max_position_embeddings, qkv, q, keys, values,
                     attention_space_, attention);
    if (last && trims) {
      Tensor few = first(q_, shape.logit_rows), few_x = first(last_x_, shape.logit_rows);
      at::index_select_out(few, attention, 0, rows.logit_rows);
      at::index_select_out(few_x, x, 0, rows.logit_rows);
      attention = few, x = few_x;
      for (Tensor* of_row : {&h, &delta, &gate_up, &s}) *of_row = first(*of_row, shape.logit_rows);
    }
    if (fp8) {
      CodedTensor coded = first_coded(coded_, attention.size(0), attention.size(1));
      code_rows(attention, coded);
    }
    multiply(attention, layer.o_t, layer.o_coded, layer.o_bias, delta);
    add_update(i, &LayerAdapter::o, attention, delta);
    norm(delta, layer.post_norm);
    if (adapter.layers.empty() && !fp8) {
      project_gated(products_.get(), h, layer.gate_up_t, gate_up, s);
    } else {
      multiply(h, layer.gate_up_t, layer.gate_up_coded, Tensor(), gate_up);
      add_update(i, &LayerAdapter::gate_up, h, gate_up);
      if (fp8) {
        CodedTensor coded = first_coded(coded_, s.size(0), s.size(1));
        swiglu_rows_coded(gate_up, adapter.layers.empty() ? nothing : s, coded);
      } else {
        swiglu_rows(gate_up, s);
      }
    }
    multiply(s, layer.down_t, layer.down_coded, Tensor(), delta);
    add_update(i, &LayerAdapter::down, s, delta);
  }
  Tensor last = first(last_, shape.logit_rows), logits = first(logits_, shape.logit_rows);
  Tensor sampled = first(sampled_, shape.draws);
  if (trims) {
    add_norm(x, delta, weights_->final_norm, eps, last);
  } else {
    add_norm_of_logit_rows(x, delta, rows, weights_->final_norm, eps, last);
  }
  project_wide(products_.get(), last, weights_->head_t, logits);
  const DrawnHead head = compute_ == at::kBFloat16 ? DrawnHead{last, weights_->head} : DrawnHead{};
  draw_rows(logits, head, rows, draw_space_, sampled);
}

// Returns whether the pass has been queued. The first pass of a shape runs normally and warms up
// what must not happen in a capture; the second is captured.
bool TorchSampling::replay([[maybe_unused]] const PassShape& shape) {
#ifdef LEEWAY_CUDA
  if (!device_.is_cuda() || !shape.decode) return false;
  Graph& known = graphs_[shape.rows];
  if (!std::exchange(known.seen, true)) return false;
  if (!known.graph) {
    auto graph = std::make_unique<at::cuda::CUDAGraph>();
    // What other threads do meanwhile, such as a trainer's allocations, is not part of the capture.
    const auto turn = capture_turn();
    graph->capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
    forward(shape);
    graph->capture_end();
    known.graph = std::move(graph);
  }
  known.graph->replay();
  return true;
#else
  return false;
#endif
}

void TorchSampling::wait() {
#ifdef LEEWAY_CUDA
  if (stream_) stream_->synchronize();
#endif
}

void TorchSampling::run(const StepRows& pass, std::vector<Drawn>& drawn) {
  const Scope scope(*this);
  const PassShape shape = shape_of(pass, own_.graphs);
  reserve(shape);
  rng_before_.clear();
  for (const Draw& draw : pass.draws) rng_before_.push_back(draw.sample->rng);
  integers_.send(pass, shape);
  if (!replay(shape)) forward(shape);
  wait();  // even without draws: the next pass overwrites the same integers
  take_drawn(pass, drawn);
}

void TorchSampling::take_drawn(const StepRows& pass, std::vector<Drawn>& drawn) {
  drawn.resize(pass.draws.size());
  std::vector<size_t> redrawn, looked_at;
  const int32_t* sampled = pass.draws.empty() ? nullptr : sampled_.data_ptr<int32_t>();
  for (size_t i = 0; i < pass.draws.size(); ++i, sampled += 4) {
    const Draw& draw = pass.draws[i];
    const SamplingSettings& settings = draw.request->request.sampling;
    const bool filtered = settings.truncates() && settings.temperature != 0.0f;
    drawn[i].failure.clear();
    if (!filtered && sampled[3] == 0) {
      drawn[i].token.id = sampled[0];
      std::memcpy(&drawn[i].token.raw_logprob, sampled + 1, sizeof(float));
      std::memcpy(&drawn[i].token.processed_logprob, sampled + 2, sizeof(float));
      if (draw.request->request.top_logprobs > 0) looked_at.push_back(i);
      continue;
    }
    draw.sample->rng = rng_before_[i];
    redrawn.push_back(i);
  }
  on_host(pass, redrawn, &HostDraws::draw, drawn);
  on_host(pass, looked_at, &HostDraws::find_most_likely, drawn);
}

// Does to the listed draws what the function does, with their rows of logits in host memory.
void TorchSampling::on_host(const StepRows& pass, const std::vector<size_t>& places,
                            HostFunction function, std::vector<Drawn>& drawn) {
  if (places.empty()) return;
  host_draws_.clear();
  host_drawn_.resize(places.size());
  std::vector<int64_t> wanted;  // rows of the logits
  for (size_t i = 0; i < places.size(); ++i) {
    const Draw& draw = pass.draws[places[i]];
    if (wanted.empty() || wanted.back() != draw.logits) wanted.push_back(draw.logits);
    host_draws_.push_back(draw);
    host_draws_.back().logits = static_cast<int64_t>(wanted.size()) - 1;
    std::swap(drawn[places[i]], host_drawn_[i]);
  }
  const Tensor rows = at::tensor(wanted, at::kLong).to(device_);
  const Tensor logits = logits_.index_select(0, rows).to(at::kCPU);
  if (!host_) host_ = std::make_unique<HostSide>(threads_);
  (host_->draws.*function)(host_draws_, logits.data_ptr<float>(), config_.vocab_size, host_drawn_);
  for (size_t i = 0; i < places.size(); ++i) std::swap(drawn[places[i]], host_drawn_[i]);
}

void TorchSampling::copy_blocks(std::span<const BlockCopy> copies) {
  static_assert(sizeof(BlockCopy) == 2 * sizeof(int32_t), "pairs lie side by side");
  if (copies.empty()) return;
  const Scope scope(*this);
  const Tensor pairs = at::from_blob(const_cast<BlockCopy*>(copies.data()),
                                     {static_cast<int64_t>(copies.size()), int64_t{2}}, at::kInt);
  copy_kv_blocks(kv_, pairs);
}

}  // namespace

MakeSamplingBackend make_torch_sampling(torch::Device device, torch::ScalarType compute,
                                        TorchSamplingOptions own) {
  return [device, compute, own](const ModelConfig& config, const EngineOptions& options,
                                int64_t most_blocks) {
    check_device(device, compute, config, own.fp8);
    return std::make_unique<TorchSampling>(config, options, most_blocks, device, compute, own);
  };
}

}  // namespace leeway
