// Exact mode on a GPU: what the sampler records in bf16 is, bit for bit, what the trainer computes
// from the same tokens, whatever either had beside them.

#include <gtest/gtest.h>
#include <torch/cuda.h>

#include <bit>
#include <cmath>
#include <functional>
#include <map>

#include "base/half.h"
#include "base/rng.h"
#include "engine/engine.h"
#include "leeway/presets.h"
#include "torch/device_room.h"
#include "torch/torch_sampling.h"
#include "torch/torch_training_backend.h"
#include "trainer/trainer.h"
#ifdef LEEWAY_CUDA
#include "cuda/device.h"
#include "cuda/device_part.h"
#endif

namespace leeway {
namespace {

const torch::Device kGpu{torch::kCUDA, 0};

#define LEEWAY_NEEDS_CUDA() \
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no GPU: compiled, not run"

struct Shape {
  const char* name;
  ModelConfig config;
};

ModelConfig model(int64_t vocabulary, int64_t hidden, int64_t inner, int64_t layers, int64_t heads,
                  int64_t kv_heads, int64_t head_dim, bool tied, bool qk_norm, bool bias) {
  ModelConfig config;
  config.vocab_size = vocabulary, config.hidden_size = hidden;
  config.intermediate_size = inner, config.num_hidden_layers = layers;
  config.num_attention_heads = heads, config.num_key_value_heads = kv_heads;
  config.head_dim = head_dim, config.max_position_embeddings = 2048;
  config.tie_word_embeddings = tied, config.qk_norm = qk_norm, config.qkv_bias = bias;
  return config;
}

// Shapes of Qwen3, SmolLM2 and Qwen2.5, with fewer layers.
std::vector<Shape> shapes() {
  return {{"qwen3", model(151936, 1024, 3072, 4, 16, 8, 128, true, true, false)},
          {"smollm2", model(49152, 576, 1536, 6, 9, 3, 64, true, false, false)},
          {"qwen2", model(5008, 896, 2432, 3, 14, 2, 64, false, false, true)}};
}

Parameters random_weights(const ModelConfig& config, uint64_t seed) {
  Parameters weights(config);
  Rng rng(seed);
  for (size_t i = 0; i < weights.table().size(); ++i) {
    const ParameterInfo& info = weights.table()[i];
    const bool norm = info.role == ParameterInfo::Role::norm;
    const double width = norm ? 0.2 : 3.0 / std::sqrt(static_cast<double>(info.shape.back()));
    for (float& value : weights.of(i)) {
      value = static_cast<float>((norm ? 1.0 : 0.0) + width * (rng.uniform() - 0.5));
    }
  }
  return weights;
}

struct Recorded {
  Sample sample;  // prompt and response, all of the response trained on
  size_t prompt = 0;
  std::vector<float> raw, processed;
  std::vector<PolicyVersion> versions;
  float temperature = 1.0f;
};

std::vector<Recorded> sample_all(Engine& engine, const ModelConfig& config, int requests,
                                 uint64_t seed, const std::function<void(int)>& between = {}) {
  Rng rng(seed);
  std::vector<std::vector<int32_t>> prompts;
  std::vector<float> temperatures;
  std::map<int64_t, size_t> places;
  for (int i = 0; i < requests; ++i) {
    std::vector<int32_t> prompt(1 + rng.below(i % 7 == 0 ? 600 : 90));
    for (int32_t& id : prompt) {
      id = static_cast<int32_t>(rng.below(static_cast<uint64_t>(config.vocab_size)));
    }
    const float temperature = i % 3 == 0 ? 0.7f : 1.0f;
    Request request{.prompt = prompt,
                    .max_new_tokens = static_cast<int64_t>(1 + rng.below(i % 11 == 0 ? 300 : 50)),
                    .seed = seed + static_cast<uint64_t>(i)};
    request.sampling.temperature = temperature;
    request.samples = i % 5 == 0 ? 3 : 1;
    places[engine.submit(std::move(request))] = prompts.size();
    prompts.push_back(std::move(prompt));
    temperatures.push_back(temperature);
  }
  for (int step = 0; !engine.idle(); ++step) {
    if (between) between(step);
    engine.step();
  }
  std::vector<Recorded> all;
  for (const SampledSequence& sampled : engine.take_finished()) {
    EXPECT_EQ(sampled.failure, "");
    const size_t place = places.at(sampled.request);
    Recorded recorded;
    recorded.prompt = prompts[place].size();
    Sample& sample = recorded.sample;
    sample.ids = prompts[place];
    sample.ids.insert(sample.ids.end(), sampled.ids.begin(), sampled.ids.end());
    sample.loss_mask.assign(sample.ids.size(), 0);
    std::fill(sample.loss_mask.begin() + static_cast<int64_t>(recorded.prompt),
              sample.loss_mask.end(), 1);
    sample.advantages.assign(sample.ids.size(), 1.0f);
    recorded.raw = sampled.raw_logprobs, recorded.processed = sampled.processed_logprobs;
    recorded.temperature = temperatures[place];
    recorded.versions = sampled.versions;
    all.push_back(std::move(recorded));
  }
  return all;
}

EngineOptions engine_options(int64_t rows) {
  EngineOptions options;
  options.max_sequences = 48;
  options.max_rows_per_step = rows;
  options.kv_bytes = int64_t{1} << 30;
  options.backend = make_torch_sampling(kGpu, torch::kBFloat16);
  return options;
}

Trainer trainer_of(const Parameters& weights, int64_t max_tokens) {
  TrainerTable table;
  table.max_tokens = max_tokens;
  return {weights, Catalog().make_spec("reinforce", {}), table,
          [](TrainingWeights of, const TrainerTable& with) {
            return make_torch_training(std::move(of), with, kGpu, torch::kBFloat16);
          }};
}

// Of the tokens that `version` sampled; returns their number. Passes of `max_tokens`, so that
// sequences have other neighbours. `leaves_room`: by a trainer on some of the multiprocessors,
// where the device can be divided.
int64_t expect_same_bits(const Parameters& weights, PolicyVersion version,
                         std::span<const Recorded> all, bool processed, int64_t max_tokens,
                         const std::string& where, bool leaves_room = false) {
  Trainer trainer = trainer_of(weights, max_tokens);
  EXPECT_EQ(trainer.leave_room(leaves_room), leaves_room);
  std::vector<Sample> samples;
  std::vector<const Recorded*> compared;
  for (const Recorded& recorded : all) {
    if (processed != (recorded.temperature != 1.0f)) continue;
    samples.push_back(recorded.sample);
    if (processed) samples.back().temperature = recorded.temperature;
    compared.push_back(&recorded);
  }
  const TokenValues logprobs = trainer.forward(samples);
  int64_t tokens = 0, different = 0;
  for (size_t i = 0; i < compared.size(); ++i) {
    const std::vector<float>& values = processed ? compared[i]->processed : compared[i]->raw;
    for (size_t t = 0; t < values.size(); ++t) {
      if (compared[i]->versions[t] != version) continue;
      ++tokens;
      different += std::bit_cast<uint32_t>(values[t]) !=
                   std::bit_cast<uint32_t>(logprobs[i][compared[i]->prompt + t]);
    }
  }
  EXPECT_EQ(different, 0) << where << ": of " << tokens << " tokens, in passes of " << max_tokens;
  return tokens;
}

// By the driver: a trainer then leaves room.
bool can_be_divided() {
#ifdef LEEWAY_CUDA
  return cuda::DevicePart::make(cuda::multiprocessors() * 2 / 3) != nullptr;
#else
  return false;
#endif
}

TEST(Exact, TheSamplersLogprobsAreTheTrainers) {
  LEEWAY_NEEDS_CUDA();
  int64_t tokens = 0;
  for (const auto& [name, config] : shapes()) {
    const Parameters weights = random_weights(config, 1);
    for (const int64_t rows : {37, 700, 3000}) {  // prompts in many pieces, in few, and whole
      Engine engine(weights, 0, engine_options(rows));
      const std::vector<Recorded> all = sample_all(engine, config, 60, 5);
      const std::string where = std::string(name) + ", " + std::to_string(rows) + " rows a step";
      for (const int64_t max_tokens : {1500, 20000}) {
        tokens += expect_same_bits(weights, 0, all, false, max_tokens, where);
        tokens += expect_same_bits(weights, 0, all, true, max_tokens, where + ", temperature 0.7");
      }
    }
  }
  EXPECT_GT(tokens, 60000);
  std::printf("%lld log-probabilities compared\n", static_cast<long long>(tokens));
}

// Sequences that go on under new weights, with their keys computed again, are those of the weights
// that each token was sampled by.
TEST(Exact, HoldsAcrossASwapOfWeights) {
  LEEWAY_NEEDS_CUDA();
  const ModelConfig config = shapes()[1].config;
  const Parameters before = random_weights(config, 1), after = random_weights(config, 2);
  EngineOptions options = engine_options(200);
  options.kv_after_swap = KvAfterSwap::recompute;
  Engine engine(before, 0, options);
  const std::vector<Recorded> all = sample_all(engine, config, 60, 9, [&](int step) {
    if (step == 25) {
      engine.update_weights(std::make_shared<const PolicySnapshot>(Parameters(after), 1));
    }
  });
  int64_t of_version[2] = {0, 0};
  for (const bool processed : {false, true}) {
    of_version[0] += expect_same_bits(before, 0, all, processed, 4000, "before the swap");
    of_version[1] += expect_same_bits(after, 1, all, processed, 4000, "after the swap");
  }
  EXPECT_GT(of_version[0], 100);
  EXPECT_GT(of_version[1], 100);
  EXPECT_GT(of_version[0] + of_version[1], 3000);
  std::printf("%lld and %lld log-probabilities compared\n", static_cast<long long>(of_version[0]),
              static_cast<long long>(of_version[1]));
}

// On some of the multiprocessors, while others are left to a sampler.
TEST(Exact, HoldsForATrainerThatLeavesRoom) {
  LEEWAY_NEEDS_CUDA();
  int64_t tokens = 0;
  for (const auto& [name, config] : shapes()) {
    const Parameters weights = random_weights(config, 1);
    if (!can_be_divided()) GTEST_SKIP() << "no GPU that the driver can divide";
    Engine engine(weights, 0, engine_options(700));
    const std::vector<Recorded> all = sample_all(engine, config, 60, 5);
    for (const bool processed : {false, true}) {
      tokens += expect_same_bits(weights, 0, all, processed, 4000, name, /*leaves_room=*/true);
    }
  }
  EXPECT_GT(tokens, 1000);
}

TEST(Exact, ATrainerThatLeavesRoomFromTimeToTimeTrainsAsOneThatDoesNot) {
  LEEWAY_NEEDS_CUDA();
  use_expandable_segments();  // as in a run
  const ModelConfig config = shapes()[1].config;
  const Parameters weights = random_weights(config, 1);
  if (!can_be_divided()) GTEST_SKIP() << "no GPU that the driver can divide";
  Engine engine(weights, 0, engine_options(700));
  std::vector<Sample> samples;
  for (Recorded& recorded : sample_all(engine, config, 40, 5)) {
    samples.push_back(std::move(recorded.sample));
    for (float& advantage : samples.back().advantages)
      advantage = samples.size() % 2 ? 1.0f : -1.0f;
  }
  Trainer whole = trainer_of(weights, 4000), part = trainer_of(weights, 4000);
  std::shared_ptr<const PolicySnapshot> kept;
  uint32_t kept_sum = 0;
  std::function<TrainingState()> saved;
  for (int step = 0; step < 6; ++step) {
    EXPECT_EQ(part.leave_room(step % 3 != 2), step % 3 != 2);
    const BatchResult expected = whole.train_batch(samples), got = part.train_batch(samples);
    ASSERT_EQ(got.failure, "");
    // Gradients of attention have no fixed order: from the second step on weights differ by that.
    if (step == 0) {
      EXPECT_EQ(got.loss, expected.loss);
    }
    EXPECT_NEAR(got.loss, expected.loss, 1e-3 * (1.0 + std::abs(expected.loss))) << step;
    EXPECT_NEAR(got.grad_norm, expected.grad_norm, 0.02 * expected.grad_norm) << step;
    // One that was made before stays as it was.
    if (kept) {
      EXPECT_EQ(kept->checksum(), kept_sum) << step;
    }
    // What a thread beside saves is of the moment that it was asked for.
    if (saved) {
      const TrainingState state = saved();
      EXPECT_EQ(checksum(state.policy), kept_sum) << step;
      EXPECT_EQ(state.optimizer.steps(), step);
    }
    kept = part.snapshot(step);
    kept_sum = kept->checksum();
    saved = part.state_later();
  }
}

class BackendWithRoom : public TorchTrainingBackend {
 public:
  using TorchTrainingBackend::TorchTrainingBackend;
  int64_t bytes = 0;

 protected:
  int64_t spare() const override { return bytes; }
};

TEST(Snapshots, TakeTheFormThatThereIsRoomFor) {
  LEEWAY_NEEDS_CUDA();
  const ModelConfig config = model(512, 64, 160, 2, 4, 2, 16, true, true, false);
  const Parameters weights = random_weights(config, 1);
  const auto is = [&](const PolicySnapshot& snapshot, bool on_device, bool rounded) {
    EXPECT_EQ(snapshot.device() != nullptr, on_device);
    EXPECT_EQ(snapshot.is_rounded(), rounded);
    const Parameters& host = snapshot.host();
    for (size_t i = 0; i < host.flat().size(); ++i) {
      // Of halves, a number in 100,000 differs by its last bit (cuda/split_float.h).
      const float whole = weights.flat()[i], expected = rounded ? from_bf16(to_bf16(whole)) : whole;
      ASSERT_NEAR(host.flat()[i], expected, rounded ? 0.0f : 1.2e-7f * std::abs(whole)) << i;
    }
  };
  BackendWithRoom backend({weights, nullptr, nullptr}, TrainerTable(), kGpu, torch::kBFloat16);
  const int64_t count = FlatLayout(config).size;
  backend.bytes = 8 * count;
  auto first = backend.snapshot(1);
  is(*first, true, false);
  backend.bytes = 4 * count;
  is(*backend.snapshot(2), true, false);  // the first is still there
  first.reset();
  is(*backend.snapshot(3), true, true);
  backend.bytes = 2 * count;
  is(*backend.snapshot(4), true, true);
  backend.bytes = 2 * count - 1;
  is(*backend.snapshot(5), false, false);

  BackendWithRoom sharing({weights, nullptr, nullptr}, TrainerTable(), kGpu, torch::kBFloat16,
                          nullptr, {.is_shared = true});
  sharing.bytes = 4 * count;
  is(*sharing.snapshot(1), true, false);
  sharing.bytes = 4 * count - 1;
  is(*sharing.snapshot(2), false, false);

  BackendWithRoom keeping({weights, nullptr, nullptr}, TrainerTable(), kGpu, torch::kBFloat16,
                          nullptr, {.keep_free = 1000});
  keeping.bytes = 8 * count + 1000;
  is(*keeping.snapshot(1), true, false);
  keeping.bytes = 8 * count + 999;
  is(*keeping.snapshot(2), true, true);
}

// The base is one copy on the device; the engine takes adapters from the trainer's memory, the
// second in the middle of its sequences.
TEST(Exact, HoldsForAdaptersOverASharedBase) {
  LEEWAY_NEEDS_CUDA();
  const std::vector<std::string> all(kLoraTargets.begin(), kLoraTargets.end());
  const std::vector<LoraSettings> adapters = {
      {.rank = 16, .alpha = 32.0, .targets = all, .base_path = ""},
      {.rank = 8, .alpha = 12.0, .targets = all, .base_path = ""},
      {.rank = 40, .alpha = 40.0, .targets = {"q_proj", "v_proj", "down_proj"}, .base_path = ""}};
  int64_t tokens = 0, after_swap = 0;
  for (size_t i = 0; i < adapters.size(); ++i) {
    const auto [name, config] = shapes()[i];
    const auto base = std::make_shared<const Parameters>(random_weights(config, 1));
    Parameters before(base, adapters[i]), after = before;
    Rng rng(4);
    for (float& value : before.flat()) value = static_cast<float>(0.02 * rng.normal());
    for (float& value : after.flat()) value = static_cast<float>(0.02 * rng.normal());
    EngineOptions options = engine_options(200);
    options.frozen = FrozenWeights::in_place;
    options.kv_after_swap = KvAfterSwap::recompute;
    const Trainer first = trainer_of(before, 4000), second = trainer_of(after, 4000);
    Engine engine(*first.snapshot(0), options);
    const std::vector<Recorded> sampled = sample_all(engine, config, 60, 5, [&](int step) {
      if (step == 25) engine.update_weights(second.snapshot(1));
    });
    for (const bool processed : {false, true}) {
      for (const int64_t max_tokens : {1500, 20000}) {
        tokens += expect_same_bits(before, 0, sampled, processed, max_tokens, name);
        after_swap += expect_same_bits(after, 1, sampled, processed, max_tokens, name);
      }
    }
  }
  EXPECT_GT(tokens, 100);
  EXPECT_GT(after_swap, 100);
  std::printf("%lld and %lld log-probabilities compared\n", static_cast<long long>(tokens),
              static_cast<long long>(after_swap));
}

}  // namespace
}  // namespace leeway
