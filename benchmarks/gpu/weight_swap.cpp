// What a new policy costs on its way from the trainer to the sampler, all of it on the device: the
// snapshot with its look at every number, and the sampler's copy. Prints one JSON object a line.
//   gpu_weight_swap
//
// As in a run: the weights are bf16 numbers, which passes read, and halves beside them that make
// them float32. A snapshot joins them, but for the larger model, whose run has no room for float32
// copies.

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <memory>
#include <optional>

#include "../report.h"
#include "torch/device_weights.h"
#include "torch/sampling_weights.h"
#include "torch/split_masters.h"

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

void report(const char* name, const ModelConfig& config, bool rounded) {
  const FlatLayout layout(config);
  const at::TensorOptions halves = at::device(at::kCUDA).dtype(at::kBFloat16);
  const SplitMasters policy{at::empty({layout.size}, halves),
                            at::zeros({rounded ? 0 : layout.size}, halves.dtype(at::kShort))};
  policy.high.uniform_(-0.02, 0.02);
  SamplingWeights sampler(config, at::kCUDA, at::kBFloat16);
  cudaDeviceSynchronize();
  std::vector<double> snapshots, loads;
  // The snapshot before lives on until the new one is there, as in a run.
  std::unique_ptr<TorchDeviceWeights> last;
  for (int round = -2; round < kRounds; ++round) {
    std::unique_ptr<TorchDeviceWeights> next;
    const double snapshot = seconds_of([&] {
      next = std::make_unique<TorchDeviceWeights>(layout,
                                                  rounded ? policy.high.clone() : joined(policy));
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
    leeway::report("0.6B, float32", leeway::config_of(false), /*rounded=*/false);
    leeway::report("8B, bf16", leeway::config_of(true), /*rounded=*/true);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}
