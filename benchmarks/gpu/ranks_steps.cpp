// Training steps of ranks with a GPU each, by the trainer itself: losses, norms, seconds and memory
// of each step, to be set beside those of one process. A launcher starts the ranks, as
// docs/scaling.md says for the program; without one it is one process. Rank 0 prints one JSON
// object a line.
//   gpu_ranks_steps [--hidden N] [--layers N] [--vocabulary N] [--tokens N] [--steps N]
//                   [--sharding optimizer|weights]

#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>

#include "base/json.h"
#include "base/rng.h"
#include "leeway/error.h"
#include "leeway/presets.h"
#include "ranks/discovery.h"
#include "ranks/gloo_ranks.h"
#include "torch/nccl_group.h"
#include "torch/torch_training.h"
#include "trainer/device_memory.h"
#include "trainer/ranks_backend.h"
#include "trainer/trainer.h"

namespace leeway {
namespace {

const at::Device kDevice(at::kCUDA, 0);
constexpr int64_t kLength = 512;  // of a sample
constexpr double kGibi = 1024.0 * 1024.0 * 1024.0;

struct Settings {
  std::map<std::string, int64_t> numbers;
  Sharding sharding = Sharding::optimizer;

  int64_t at(const char* name) const { return numbers.at(name); }
};

Settings parse(int argc, char** argv) {
  Settings settings;
  auto& numbers = settings.numbers;
  numbers = {{"--hidden", 1024},
             {"--layers", 8},
             {"--vocabulary", 32768},
             {"--tokens", 16384},
             {"--steps", 5}};
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::string(argv[i]) == "--sharding" && value_named<Sharding>(argv[i + 1])) {
      settings.sharding = *value_named<Sharding>(argv[i + 1]);
      continue;
    }
    const auto found = numbers.find(argv[i]);
    if (found == numbers.end()) throw Error(std::string(argv[i]) + ": unknown option");
    found->second = std::atoll(argv[i + 1]);
  }
  return settings;
}

ModelConfig config_of(const Settings& settings) {
  ModelConfig config;
  config.vocab_size = settings.at("--vocabulary");
  config.hidden_size = settings.at("--hidden");
  config.intermediate_size = 3 * config.hidden_size;
  config.num_hidden_layers = settings.at("--layers");
  config.num_attention_heads = config.hidden_size / 64;
  config.num_key_value_heads = config.num_attention_heads / 2;
  config.head_dim = 128;
  config.max_position_embeddings = 2 * kLength;
  config.tie_word_embeddings = true;
  config.qk_norm = true;
  return config;
}

std::vector<Sample> samples_of(const Settings& settings, uint64_t seed) {
  Rng rng(seed);
  std::vector<Sample> samples;
  for (int64_t first = 0; first < settings.at("--tokens"); first += kLength) {
    Sample& sample = samples.emplace_back();
    sample.rollout_id = static_cast<int32_t>(samples.size());
    sample.ids.resize(static_cast<size_t>(kLength));
    for (int32_t& id : sample.ids) id = static_cast<int32_t>(rng.below(1000));
    sample.advantages.assign(sample.ids.size(), rng.below(2) == 0 ? 1.0f : -0.5f);
    sample.loss_mask.assign(sample.ids.size(), 1);
    sample.loss_mask[0] = 0;
  }
  return samples;
}

double gib(int64_t bytes) { return static_cast<double>(bytes) / kGibi; }

void train(const Settings& settings, const Parameters& policy, const LossSpec& spec, int ranks,
           const MakeTrainingBackend& backend) {
  TrainerTable table;
  table.max_tokens = 4096;
  table.optimizer.learning_rate = 1e-4;
  table.max_steps = settings.at("--steps");
  table.sharding = settings.sharding;
  // What there is between two steps.
  DeviceMemoryUse use;
  use.model = policy.config();
  use.ranks = ranks, use.sharding = settings.sharding;
  const DeviceMemory need = device_memory(use);
  const int64_t computed = need.weights + need.gradients + need.moments + need.gathered;
  Trainer trainer(policy, spec, table, backend);
  for (int64_t step = 0; step < settings.at("--steps"); ++step) {
    const auto begin = std::chrono::steady_clock::now();
    const BatchResult result =
        trainer.train_batch(samples_of(settings, static_cast<uint64_t>(step)));
    at::cuda::getCurrentCUDAStream().synchronize();
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    if (!result.failure.empty()) throw Error(result.failure);
    const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(0);
    JsonWriter json;
    json.begin_object().key("ranks").value(static_cast<double>(ranks));
    json.key("step").value(static_cast<double>(step));
    json.key("loss").value(result.loss).key("grad_norm").value(result.grad_norm);
    json.key("seconds").value(seconds.count());
    json.key("step_seconds").value(result.step_seconds);
    json.key("sharding").value(std::string(name_of(settings.sharding)));
    json.key("computed_gib").value(gib(computed));
    json.key("allocated_gib").value(gib(stats.allocated_bytes[0].current));
    json.key("peak_gib").value(gib(stats.allocated_bytes[0].peak));
    std::printf("%s\n", json.end_object().text().c_str());
    std::fflush(stdout);
  }
  const auto snapshot = trainer.snapshot(1);
  std::printf("checksum of weights %08x, on the host %08x\n", snapshot->checksum(),
              checksum(trainer.parameters()));
}

void run(const Settings& settings) {
  const LossSpec spec = Catalog().make_spec("reinforce", {});
  Parameters policy(config_of(settings));
  const auto options = ranks_from_environment([](const char* name) { return std::getenv(name); });
  if (!options) {
    initialise(policy, 1);
    return train(settings, policy, spec, 1, [](TrainingWeights weights, const TrainerTable& table) {
      return make_torch_training(std::move(weights), table, kDevice, at::kBFloat16);
    });
  }
  const MakeRankBackend make = [](Ranks& ranks, TrainingWeights weights,
                                  const TrainerTable& table) {
    auto group = make_nccl_group(ranks, kDevice);
    return make_torch_rank(ranks, std::move(group), std::move(weights), table, kDevice,
                           at::kBFloat16);
  };
  const auto ranks = join_ranks(*options);
  if (ranks->rank() > 0) {
    KeptSnapshots snapshots;
    return serve_training(*ranks, {.like = &policy, .specs = {&spec}, .make = make}, snapshots);
  }
  initialise(policy, 1);
  RanksTraining training(*ranks, {&spec}, make);
  train(settings, policy, spec, ranks->size(), training.backends());
  for (const auto& [name, value] : training.take_metrics()) {
    std::printf("%s %.4f\n", name.c_str(), value);
  }
  training.end();
}

}  // namespace
}  // namespace leeway

int main(int argc, char** argv) {
  try {
    leeway::run(leeway::parse(argc, argv));
    return 0;
  } catch (const leeway::Lost& lost) {
    std::fprintf(stderr, "%s\n", lost.what());
    return 3;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}
