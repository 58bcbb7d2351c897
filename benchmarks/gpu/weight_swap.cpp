// What a new policy costs on its way from the trainer to the sampler, all of it on the device: the
// snapshot with its look at every number, and the sampler's copy. Prints one JSON object a line.
//   gpu_weight_swap
//
// The larger model has no masters: its weights exist in bf16 alone.

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <memory>
#include <optional>

#include "../report.h"
#include "torch/device_weights.h"
#include "torch/sampling_weights.h"

namespace leeway {
namespace {

constexpr int kRounds = 7;

ModelConfig config_of(bool large) {
  ModelConfig config;
  config.vocab_size = 151936;
  config.hidden_size = large ? 4096 : 1024;
  config.intermediate_size = large ? 12288 : 3072;
  config.num_hidden_layers = large ? 36 : 28;
  config.num_attention_heads = large ? 32 : 16;
  config.num_key_value_heads = 8;
  config.head_dim = 128;
  config.max_position_embeddings = 4096;
  config.rope_theta = 1e6;
  config.tie_word_embeddings = !large;
  config.qk_norm = true;
  return config;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void report(const char* name, const ModelConfig& config, at::ScalarType type) {
  const FlatLayout layout(config);
  const at::Tensor policy = at::empty({layout.size}, at::device(at::kCUDA).dtype(type));
  policy.uniform_(-0.02, 0.02);
  SamplingWeights sampler(config, at::kCUDA, at::kBFloat16);
  cudaDeviceSynchronize();
  std::vector<double> snapshots, loads;
  // The snapshot before lives on until the new one is there, as in a run.
  std::unique_ptr<TorchDeviceWeights> last;
  for (int round = -2; round < kRounds; ++round) {
    std::unique_ptr<TorchDeviceWeights> next;
    const double snapshot = seconds_of([&] {
      next = std::make_unique<TorchDeviceWeights>(layout, policy.clone());
      if (!next->not_finite_text().empty()) throw Error("weights that are not finite");
    });
    const double load = seconds_of([&] {
      sampler.load(*next);
      cudaDeviceSynchronize();
    });
    last = std::move(next);
    if (round >= 0) snapshots.push_back(1e3 * snapshot), loads.push_back(1e3 * load);
  }
  JsonWriter json;
  json.begin_object().key("name").value(name);
  json.key("billion_parameters").value(1e-9 * static_cast<double>(layout.size));
  json.key("snapshot_ms").value(median(snapshots)).key("load_weights_ms").value(median(loads));
  json.key("swap_ms").value(median(snapshots) + median(loads));
  std::printf("%s\n", json.end_object().text().c_str());
  std::fflush(stdout);
}

}  // namespace
}  // namespace leeway

int main() {
  try {
    const c10::InferenceMode inference;
    leeway::report("0.6B, float32 masters", leeway::config_of(false), at::kFloat);
    leeway::report("8B, bf16", leeway::config_of(true), at::kBFloat16);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}
