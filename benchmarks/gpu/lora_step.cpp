// A training step of an adapter over a model of 8 billion parameters on one GPU, and sampling with
// it: memory at its peak and tokens per second. Prints one JSON object. The weights are random
// numbers of the right size, which is all that memory and speed depend on.
//
//   lora_step [LAYERS] [TOKENS]    default: 32 layers, 8192 tokens a step

#include <c10/cuda/CUDACachingAllocator.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "base/rng.h"
#include "engine/engine.h"
#include "leeway/presets.h"
#include "torch/torch_sampling.h"
#include "torch/torch_training.h"
#include "trainer/trainer.h"

namespace leeway {
namespace {

const torch::Device kGpu(torch::kCUDA, 0);

ModelConfig llama_8b(int64_t layers) {
  ModelConfig config;
  config.family = Family::llama;
  config.vocab_size = 128256, config.hidden_size = 4096, config.intermediate_size = 14336;
  config.num_hidden_layers = layers, config.num_attention_heads = 32;
  config.num_key_value_heads = 8, config.head_dim = 128, config.max_position_embeddings = 8192;
  config.rms_norm_eps = 1e-5, config.rope_theta = 500000.0;
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
        const auto size = static_cast<float>(std::sqrt(3.0 / static_cast<double>(info.shape.back())));
        uint32_t state = static_cast<uint32_t>(977 * i + k + 1);
        for (size_t j = values.size() * k / count; j < values.size() * (k + 1) / count; ++j) {
          state = state * 1664525u + 1013904223u;
          values[j] = norm ? 1.0f
                           : size * (static_cast<float>(state >> 8) * 0x1p-23f - 1.0f) * 0.5f;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

double gib(int64_t bytes) { return static_cast<double>(bytes) / (int64_t{1} << 30); }

int64_t peak_bytes() {
  const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(0);
  return stats.reserved_bytes[0].peak;
}

double seconds_of(const auto& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  cudaDeviceSynchronize();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

void run(int64_t layers, int64_t tokens) {
  Parameters base(llama_8b(layers));
  fill(base);
  const int64_t parameters = base.count();
  Parameters adapter(
      std::make_shared<const Parameters>(std::move(base)),
      {.rank = 16,
       .alpha = 32.0,
       .targets = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
       .base_path = ""});
  initialise(adapter, 1);
  TrainerTable table;
  table.max_tokens = tokens;
  table.recompute_activations = true;
  Trainer trainer(adapter, Catalog().make_spec("icepop", {}), table,
                  [](TrainingWeights weights, const TrainerTable& with) {
                    return make_torch_training(std::move(weights), with, kGpu, torch::kBFloat16);
                  });
  EngineOptions options;
  options.max_sequences = 64, options.max_rows_per_step = 8192;
  options.kv_bytes = int64_t{8} << 30;
  options.frozen = FrozenWeights::in_place;
  options.backend = make_torch_sampling(kGpu, torch::kBFloat16);
  Engine engine(*trainer.snapshot(0), options);

  constexpr int64_t kLength = 1024, kPrompt = 256;
  Rng rng(3);
  std::vector<Sample> samples(static_cast<size_t>(tokens / kLength));
  for (Sample& sample : samples) {
    for (int64_t t = 0; t < kLength + 1; ++t) {
      sample.ids.push_back(static_cast<int32_t>(rng.below(128256)));
      sample.loss_mask.push_back(t >= kPrompt);
    }
    sample.advantages = {static_cast<float>(rng.normal())};
    sample.rollout.assign(sample.ids.size(), -11.8f);
  }
  std::string failure;
  const auto step = [&] { failure += trainer.train_batch(samples).failure; };
  const double first = seconds_of(step);
  constexpr int kSteps = 3;
  const double trained = seconds_of([&] {
    for (int i = 0; i < kSteps; ++i) step();
  });
  const int64_t trainer_peak = peak_bytes();
  const double swap = seconds_of([&] {
    engine.update_weights(trainer.snapshot(1));
    engine.take_pending();
  });
  for (int i = 0; i < 64; ++i) {
    Request request;
    for (int t = 0; t < 32; ++t) {
      request.prompt.push_back(static_cast<int32_t>(rng.below(128256)));
    }
    request.max_new_tokens = 64;
    engine.submit(std::move(request));
  }
  int64_t sampled = 0;
  const double sampling = seconds_of([&] {
    while (!engine.idle()) sampled += engine.step().sampled;
  });
  std::printf(
      "{\"parameters\": %lld, \"adapter\": %lld, \"tokens_per_step\": %lld, \"first_step_s\": %.2f, "
      "\"step_s\": %.3f, \"trained_tokens_per_s\": %.0f, \"swap_s\": %.3f, "
      "\"sampled_tokens_per_s\": %.0f, \"peak_gib_training\": %.1f, \"peak_gib\": %.1f, "
      "\"failure\": \"%s\"}\n",
      static_cast<long long>(parameters), static_cast<long long>(adapter.count()),
      static_cast<long long>(tokens), first, trained / kSteps,
      static_cast<double>(kSteps * tokens) / trained, swap,
      static_cast<double>(sampled) / sampling, gib(trainer_peak), gib(peak_bytes()),
      failure.c_str());
}

}  // namespace
}  // namespace leeway

int main(int argc, char** argv) {
  leeway::run(argc > 1 ? std::atoll(argv[1]) : 32, argc > 2 ? std::atoll(argv[2]) : 8192);
}
