// Training steps of an adapter beside those of all weights on one GPU, and sampling with either:
// time, tokens per second and memory at its peak, by the trainer and the engine of a run. For the
// largest shape the parts of the trainer's backend (src/torch/policy_network.cpp) are made here,
// with weights that are drawn on the device: on the host they alone would take half a minute. The
// weights are random numbers of the right size. Prints one JSON object a line.
//   gpu_lora_step [--tokens N] [--only 135M|0.6B|8B]

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <thread>

#include "base/json.h"
#include "base/rng.h"
#include "data/packed_batch.h"
#include "engine/engine.h"
#include "leeway/error.h"
#include "leeway/presets.h"
#include "torch/device_room.h"
#include "torch/flat_adamw.h"
#include "torch/tensor_head.h"
#include "torch/torch_sampling.h"
#include "torch/torch_training.h"
#include "torch/trunk.h"
#include "trainer/trainer.h"

namespace leeway {
namespace {

constexpr double kGibi = 1024.0 * 1024.0 * 1024.0;
constexpr int64_t kLength = 1024;  // of a trained sequence
constexpr int kSteps = 3;
const at::Device kDevice(at::kCUDA, 0);

struct Options {
  int64_t tokens = 16384;
  std::string only;
};

struct Shape {
  const char* name;
  int64_t vocabulary, hidden, inner, layers, heads, kv_heads, head_dim;
  bool qwen3;
};
// SmolLM2, and two of Qwen3.
constexpr Shape kShapes[] = {{"135M", 49152, 576, 1536, 30, 9, 3, 64, false},
                             {"0.6B", 151936, 1024, 3072, 28, 16, 8, 128, true},
                             {"8B", 151936, 4096, 12288, 36, 32, 8, 128, true}};

ModelConfig config_of(const Shape& shape) {
  ModelConfig config;
  config.vocab_size = shape.vocabulary, config.hidden_size = shape.hidden;
  config.intermediate_size = shape.inner, config.num_hidden_layers = shape.layers;
  config.num_attention_heads = shape.heads, config.num_key_value_heads = shape.kv_heads;
  config.head_dim = shape.head_dim, config.max_position_embeddings = 8192;
  config.tie_word_embeddings = shape.hidden < 4096, config.qk_norm = shape.qwen3;
  return config;
}

// Uniform numbers with the deviation that `initialise` gives, by all cores: eight billion normal
// ones would take minutes.
void fill(Parameters& weights) {
  std::vector<std::thread> threads;
  const size_t count = std::max(1u, std::thread::hardware_concurrency());
  for (size_t k = 0; k < count; ++k) {
    threads.emplace_back([&, k] {
      for (size_t i = 0; i < weights.table().size(); ++i) {
        const ParameterInfo& info = weights.table()[i];
        const std::span<float> values = weights.of(i);
        const bool norm = info.role == ParameterInfo::Role::norm;
        const auto size =
            static_cast<float>(std::sqrt(3.0 / static_cast<double>(info.shape.back())));
        auto state = static_cast<uint32_t>(977 * i + k + 1);
        for (size_t j = values.size() * k / count; j < values.size() * (k + 1) / count; ++j) {
          state = state * 1664525u + 1013904223u;
          values[j] = norm ? 1.0f : size * (static_cast<float>(state >> 8) * 0x1p-23f - 1.0f);
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

double gib(int64_t bytes) { return static_cast<double>(bytes) / kGibi; }

template <class Work>
double seconds_of(const Work& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  c10::cuda::device_synchronize();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Of kSteps, after one to warm up.
template <class Work>
double median_seconds_of(const Work& work) {
  seconds_of(work);
  std::vector<double> seconds;
  for (int i = 0; i < kSteps; ++i) seconds.push_back(seconds_of(work));
  std::sort(seconds.begin(), seconds.end());
  return seconds[seconds.size() / 2];
}

std::vector<Sample> samples_of(const ModelConfig& config, int64_t tokens) {
  Rng rng(3);
  std::vector<Sample> samples(static_cast<size_t>(tokens / kLength));
  for (Sample& sample : samples) {
    // All but the first token are trained. The last is not read: it has no row.
    for (int64_t t = 0; t < kLength + 1; ++t) {
      sample.ids.push_back(
          static_cast<int32_t>(rng.below(static_cast<uint64_t>(config.vocab_size))));
      sample.loss_mask.push_back(t > 0);
    }
    sample.advantages.assign(sample.ids.size(), static_cast<float>(rng.normal()));
  }
  return samples;
}

// 64 sequences of 32 + 128 tokens. Returns sampled tokens per second.
double sampling_rate(Engine& engine, const ModelConfig& config) {
  Rng rng(5);
  for (int i = 0; i < 64; ++i) {
    Request request;
    for (int t = 0; t < 32; ++t) {
      request.prompt.push_back(
          static_cast<int32_t>(rng.below(static_cast<uint64_t>(config.vocab_size))));
    }
    request.max_new_tokens = 128;
    engine.submit(std::move(request));
  }
  int64_t sampled = 0;
  const double seconds = seconds_of([&] {
    while (!engine.idle()) sampled += engine.step().sampled;
  });
  return static_cast<double>(sampled) / seconds;
}

void print_step(const Options& options, double step, JsonWriter& json) {
  const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(0);
  json.key("step_seconds").value(step);
  json.key("trained_tokens_per_second").value(static_cast<double>(options.tokens) / step);
  json.key("allocated_gib").value(gib(stats.allocated_bytes[0].peak));
  json.key("reserved_gib").value(gib(stats.reserved_bytes[0].peak));
}

void measure(const Options& options, const Parameters& policy, Recompute recompute,
             JsonWriter& json) {
  TrainerTable table;
  table.max_tokens = options.tokens;
  table.recompute_activations = recompute;
  Trainer trainer(policy, Catalog().make_spec("reinforce", {}), table,
                  [](TrainingWeights weights, const TrainerTable& with) {
                    return make_torch_training(std::move(weights), with, kDevice, at::kBFloat16);
                  });
  EngineOptions engine_options;
  engine_options.max_sequences = 64, engine_options.max_rows_per_step = 8192;
  engine_options.kv_bytes = int64_t{4} << 30;
  if (policy.lora() != nullptr) engine_options.frozen = FrozenWeights::in_place;
  engine_options.backend = make_torch_sampling(kDevice, at::kBFloat16);
  Engine engine(*trainer.snapshot(0), engine_options);

  const std::vector<Sample> samples = samples_of(policy.config(), options.tokens);
  std::string failure;
  const double step = median_seconds_of([&] { failure += trainer.train_batch(samples).failure; });
  const double swap = seconds_of([&] {
    engine.update_weights(trainer.snapshot(1));
    engine.step();
  });
  sampling_rate(engine, policy.config());
  const double rate = sampling_rate(engine, policy.config());
  print_step(options, step, json);
  json.key("swap_seconds").value(swap);
  json.key("sampled_tokens_per_second").value(rate);
  if (!failure.empty()) json.key("failure").value(failure);
}

// The backend's tensors for an adapter, and its step.
class AdapterLearner {
 public:
  AdapterLearner(const Parameters& adapter, Recompute recompute)
      : base_layout_(adapter.config()),
        layout_(adapter),
        recompute_(recompute),
        spec_(Catalog().make_spec("reinforce", {})) {
    const at::TensorOptions numbers = at::TensorOptions(kDevice).dtype(at::kFloat);
    base_ = at::empty({base_layout_.size}, numbers.dtype(at::kBFloat16));
    base_.normal_(0.0, 0.02);
    base_.narrow(0, base_layout_.decaying, base_layout_.size - base_layout_.decaying).fill_(1.0);
    masters_ = at::zeros({layout_.size}, numbers), gradients_ = at::zeros({layout_.size}, numbers);
    copy_ = at::zeros({layout_.size}, numbers.dtype(at::kBFloat16));
    copy_to_flat(layout_, adapter, masters_), copy_to_flat(layout_, adapter, copy_);
    moments_ = make_moments(layout_, kDevice, OptimizerState::float32);
    views_ = adapter_views(layout_, gradients_);
    frozen_.layers.resize(static_cast<size_t>(adapter.config().num_hidden_layers));
    trunk_.emplace(adapter.config(), network_views(base_layout_, base_),
                   TorchRopeTable(adapter.config(), kDevice), adapter_views(layout_, copy_));
  }

  void step(const MicroBatch& batch) {
    const BatchOnDevice on(batch, kDevice, true);
    TrunkRecord record;
    const at::Tensor hidden = trunk_->forward(on.tokens, batch.cu_seqlens, recompute_, &record);
    const HeadLoss found = head_loss(pool_, {on, hidden, trunk_->head_weight(), trunk_->products()},
                                     spec_, false, static_cast<double>(batch.size()), at::Tensor());
    trunk_->backward(std::move(record), found.d_hidden, frozen_, true, views_);
    if (!std::isfinite(found.loss.item<double>())) throw Error("the loss is not finite");
    FlatAdamW step;
    step.parameters = masters_, step.copy = copy_, step.decaying = layout_.decaying;
    step.gradients = gradients_, step.moments = moments_;
    const double norm = norm_of(gradients_);
    adamw_step(step, OptimizerTable(), ++steps_, 1e-4, norm > 1.0 ? 1.0 / norm : 1.0);
  }

 private:
  FlatLayout base_layout_, layout_;
  Recompute recompute_;
  LossSpec spec_;
  ThreadPool pool_{1};
  at::Tensor base_, masters_, copy_, gradients_;
  FlatMoments moments_;
  AdapterTensors views_;
  NetworkTensors frozen_;
  std::optional<Trunk> trunk_;
  int64_t steps_ = 0;
};

void measure_parts(const Options& options, const Parameters& adapter, Recompute recompute,
                   JsonWriter& json) {
  const at::NoGradGuard guard;
  const std::vector<Sample> samples = samples_of(adapter.config(), options.tokens);
  const PackedBatch packed = pack_samples(samples, false);
  std::vector<size_t> all(samples.size());
  std::iota(all.begin(), all.end(), size_t{0});
  MicroBatch batch;
  gather(packed, all, batch);
  AdapterLearner learner(adapter, recompute);
  print_step(options, median_seconds_of([&] { learner.step(batch); }), json);
}

// With `engine` the trainer and the engine of a run are measured.
void print(const Options& options, const Shape& shape, const Parameters& policy,
           Recompute recompute, bool engine) {
  JsonWriter json;
  json.begin_object().key("model").value(std::string(shape.name));
  json.key("trained").value(std::string(policy.lora() != nullptr ? "adapter" : "all weights"));
  json.key("trained_numbers").value(static_cast<double>(policy.count()));
  json.key("tokens").value(static_cast<double>(options.tokens));
  json.key("recompute_activations").value(std::string(name_of(recompute)));
  json.key("with_engine").value(engine);
  c10::cuda::CUDACachingAllocator::emptyCache();
  c10::cuda::CUDACachingAllocator::resetPeakStats(0);
  try {
    if (engine) {
      measure(options, policy, recompute, json);
    } else {
      measure_parts(options, policy, recompute, json);
    }
  } catch (const std::exception& error) {
    json.key("failure").value(std::string(error.what()));
  }
  std::printf("%s\n", json.end_object().text().c_str());
  std::fflush(stdout);
}

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; i += 2) {
    const std::string name = argv[i], value = i + 1 < argc ? argv[i + 1] : "";
    if (name == "--tokens" && std::atoi(value.c_str()) >= kLength) {
      options.tokens = std::atoi(value.c_str()) / kLength * kLength;
    } else if (name == "--only" && !value.empty()) {
      options.only = value;
    } else {
      throw Error("gpu_lora_step: " + name + " " + value +
                  ": unknown option; options are --tokens N (at least 1024), --only "
                  "135M|0.6B|8B");
    }
  }
  return options;
}

void run(const Options& options) {
  use_expandable_segments();
  at::zeros({1}, kDevice);  // makes the context and the allocator
  const LoraSettings lora = {.rank = 16,
                             .alpha = 32.0,
                             .targets = {kLoraTargets.begin(), kLoraTargets.end()},
                             .base_path = ""};
  for (const Shape& shape : kShapes) {
    if (!options.only.empty() && options.only != shape.name) continue;
    if (shape.hidden < 4096) {
      auto base = std::make_shared<Parameters>(config_of(shape));
      fill(*base);
      print(options, shape, *base, Recompute::off, true);
      Parameters adapter(base, lora);
      initialise(adapter, 1);
      print(options, shape, adapter, Recompute::off, true);
    } else {
      Parameters adapter(config_of(shape), lora);
      initialise(adapter, 1);
      for (const Recompute recompute : {Recompute::off, Recompute::layer}) {
        print(options, shape, adapter, recompute, false);
      }
    }
  }
}

}  // namespace
}  // namespace leeway

int main(int argc, char** argv) {
  try {
    leeway::run(leeway::parse(argc, argv));
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}
