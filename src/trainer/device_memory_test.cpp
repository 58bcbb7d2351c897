#include "trainer/device_memory.h"

#include <gtest/gtest.h>

namespace leeway {
namespace {

constexpr int64_t kGibi = int64_t{1} << 30;

// Qwen3's shapes of 0.6 and 8 billion parameters.
DeviceMemoryUse small_use() {
  DeviceMemoryUse use;
  use.model.vocab_size = 151936;
  use.model.hidden_size = 1024, use.model.intermediate_size = 3072;
  use.model.num_hidden_layers = 28;
  use.model.num_attention_heads = 16, use.model.num_key_value_heads = 8;
  use.model.head_dim = 128;
  use.model.qk_norm = true, use.model.tie_word_embeddings = true;
  use.max_tokens = 16384;
  return use;
}
DeviceMemoryUse large_use() {
  DeviceMemoryUse use = small_use();
  use.model.hidden_size = 4096, use.model.intermediate_size = 12288;
  use.model.num_hidden_layers = 36, use.model.num_attention_heads = 32;
  use.model.tie_word_embeddings = false;
  return use;
}

void expect_words(const std::string& text, const std::vector<std::string>& words) {
  for (const std::string& word : words) {
    EXPECT_NE(text.find(word), std::string::npos) << "without: " << word << "\n" << text;
  }
}

TEST(DeviceMemory, IsTheSumThatIsMadeByHand) {
  DeviceMemoryUse use = small_use();
  const int64_t layer = 1024 * (4096 + 2048 + 3 * 3072) + 2 * 1024 + 2 * 128;
  const int64_t count = 151936 * 1024 + 28 * layer + 1024;
  EXPECT_EQ(device_memory(use).weights, 4 * count);
  EXPECT_EQ(device_memory(use).gradients, 4 * count);
  EXPECT_EQ(device_memory(use).moments, 8 * count);
  // Of a token in a layer: x, queries with keys and values, attention and its sums, the stream
  // after it, gate and up.
  int64_t kept = 2 * (1024 + 4096 + 2048 + 1024 + 6144) + 4 * 16;
  EXPECT_EQ(kept, 28736);
  EXPECT_EQ(device_memory(use).activations, 16384 * (28 * kept + 2048));
  // One GiB for logits, hidden states and their gradient, four numbers a token.
  EXPECT_EQ(device_memory(use).workspace, kGibi + 16384 * (16 + 2 * 2048));
  use.recompute = Recompute::selective;
  EXPECT_EQ(device_memory(use).activations, 16384 * (28 * (kept - 2 * 6144) + 2048));
  use.recompute = Recompute::layer;
  EXPECT_EQ(device_memory(use).activations, 16384 * (28 * 2048 + 2048));
  use.optimizer_state = OptimizerState::int8;
  EXPECT_EQ(device_memory(use).moments, 2 * count + count / 32);
  use.half = false;
  EXPECT_EQ(device_memory(use).activations, 16384 * (28 * 4096 + 4096));
  const DeviceMemory all = device_memory(use);
  EXPECT_EQ(all.total(), all.weights + all.gradients + all.moments + all.activations +
                             all.workspace + all.libraries);
}

TEST(DeviceMemory, HasTheModelOnceBelowAnAdapter) {
  DeviceMemoryUse use = small_use();
  const int64_t all = device_memory(use).weights / 4;
  use.lora = {16, 32.0, {"q_proj", "down_proj"}, ""};
  const int64_t adapter = 28 * 16 * ((1024 + 2048) + (3072 + 1024));
  EXPECT_EQ(device_memory(use).weights, 2 * all + 6 * adapter);
  EXPECT_EQ(device_memory(use).gradients, 4 * adapter);
  EXPECT_EQ(device_memory(use).moments, 8 * adapter);
  use.sampler = {.engines = 1, .kv_bytes = kGibi, .max_sequences = 0, .max_rows = 0};
  EXPECT_EQ(device_memory(use).sampler, 2 * adapter + kGibi);
  use.sampler.in_process = false;
  EXPECT_EQ(device_memory(use).sampler, 2 * (adapter + all) + kGibi);
  DeviceMemoryUse large = large_use();
  large.lora = {16, 32.0, {kLoraTargets.begin(), kLoraTargets.end()}, ""};
  EXPECT_EQ(why_it_does_not_fit(large, 80 * kGibi), "");
}

TEST(DeviceMemory, CountsOtherPoliciesAndEngines) {
  DeviceMemoryUse use = small_use();
  const DeviceMemory alone = device_memory(use);
  use.other_policies = {use.model, large_use().model};
  EXPECT_EQ(device_memory(use).other_policies,
            (alone.weights + device_memory(large_use()).weights) / 2);
  use.sampler = {.engines = 2, .kv_bytes = kGibi, .max_sequences = 256, .max_rows = 8192};
  const int64_t pass = 8192 * 2 * (3 * 1024 + 4096 + 2 * 2048 + 3 * 3072);
  const int64_t draws = 256 * (2 * 1024 + 4 * 151936);
  EXPECT_EQ(device_memory(use).sampler, 2 * (alone.weights / 2 + kGibi + pass + draws));
  // A byte instead of two for a matrix of a layer, a scale for each of its outputs, and codes of a
  // pass's rows.
  use.sampler.fp8_engines = 1;
  const int64_t matrices = 28 * 1024 * (4096 + 2048 + 3 * 3072);
  const int64_t scales = 28 * 4 * (4096 + 1024 + 6144 + 1024);
  EXPECT_EQ(device_memory(use).sampler,
            2 * (alone.weights / 2 + kGibi + pass + draws) - matrices + scales + 8192 * (3072 + 4));
  use.lora = {16, 32.0, {"q_proj"}, ""};
  const int64_t with_codes = device_memory(use).sampler;
  use.sampler.fp8_engines = 0;  // the base is there anyway, and codes come beside it
  EXPECT_EQ(with_codes - device_memory(use).sampler, matrices + scales + 8192 * (3072 + 4));
}

TEST(DeviceMemory, WhatFitsIsNotRefusedAndWhatDoesNotIsWithItsNumbers) {
  EXPECT_EQ(why_it_does_not_fit(small_use(), 80 * kGibi), "");
  EXPECT_EQ(why_it_does_not_fit(small_use(), device_memory(small_use()).total()), "");
  const std::string text = why_it_does_not_fit(small_use(), 21 * kGibi);
  expect_words(text, {"21.0 are free", "weights", "gradients", "moments in float32",
                      "activations of 16384 tokens", "\"off\"", "These settings fit:",
                      "trainer.max_tokens = 8192: ", "trainer.optimizer_state = \"int8\": ",
                      "trainer.recompute_activations = \"selective\": "});
}

// Every suggestion that is made fits, whatever the memory.
TEST(DeviceMemory, SuggestsWhatFits) {
  for (int64_t free = 8 * kGibi; free < 160 * kGibi; free += 7 * kGibi) {
    for (const DeviceMemoryUse& use : {small_use(), large_use()}) {
      const std::string text = why_it_does_not_fit(use, free);
      if (text.empty()) {
        EXPECT_LE(device_memory(use).total(), free);
        continue;
      }
      EXPECT_GT(device_memory(use).total(), free);
      const size_t fit = text.find("These settings fit:");
      if (fit == std::string::npos) {
        DeviceMemoryUse least = use;
        least.recompute = Recompute::layer, least.optimizer_state = OptimizerState::int8;
        least.max_tokens = 512;
        EXPECT_GT(device_memory(least).total(), free) << text;
        expect_words(text, {"No settings make it fit"});
        continue;
      }
      for (size_t at = fit; (at = text.find("\": ", at)) != std::string::npos; ++at) {
        EXPECT_LE(std::stod(text.substr(at + 3)), static_cast<double>(free) / kGibi + 0.05) << text;
      }
    }
  }
}

TEST(DeviceMemory, EightBillionParametersTrainOnOneGpuWithMomentsInBytes) {
  const int64_t free = 139 * kGibi;  // an H200
  const std::string text = why_it_does_not_fit(large_use(), free);
  expect_words(text, {"139.0 are free",
                      "trainer.optimizer_state = \"int8\" and "
                      "trainer.recompute_activations = \"selective\": "});
  DeviceMemoryUse use = large_use();
  use.recompute = Recompute::layer, use.optimizer_state = OptimizerState::int8;
  EXPECT_EQ(why_it_does_not_fit(use, free), "");
}

// 6 bytes a parameter, and 10 that ranks share.
TEST(DeviceMemory, RanksShareMastersAndMoments) {
  DeviceMemoryUse use = large_use();
  const DeviceMemory alone = device_memory(use);
  for (const int64_t ranks : {2, 4, 8, 64}) {
    use.ranks = ranks;
    const DeviceMemory each = device_memory(use);
    EXPECT_EQ(each.gradients, alone.gradients);
    EXPECT_EQ(each.weights, alone.weights / 2 + alone.weights / 2 / ranks);
    EXPECT_EQ(each.moments, alone.moments / ranks);
    EXPECT_EQ(each.activations, alone.activations);
  }
  use.ranks = 8, use.recompute = Recompute::layer;
  EXPECT_EQ(why_it_does_not_fit(use, 80 * kGibi), "");  // an H100
}

// The base and what passes read of an adapter are whole on each; its moments are in parts.
TEST(DeviceMemory, RanksShareTheMomentsOfAnAdapter) {
  DeviceMemoryUse use = small_use();
  use.lora = {16, 32.0, {"q_proj", "down_proj"}, ""};
  const DeviceMemory alone = device_memory(use);
  for (const int64_t ranks : {2, 4, 64}) {
    use.ranks = ranks;
    const DeviceMemory each = device_memory(use);
    EXPECT_EQ(each.weights, alone.weights);
    EXPECT_EQ(each.gradients, alone.gradients);
    EXPECT_EQ(each.moments, alone.moments / ranks);
    EXPECT_EQ(each.total(), alone.total() - alone.moments + alone.moments / ranks);
  }
}

// Qwen3's shape of 32 billion parameters.
DeviceMemoryUse largest_use() {
  DeviceMemoryUse use = large_use();
  use.model.hidden_size = 5120, use.model.intermediate_size = 25600;
  use.model.num_hidden_layers = 64, use.model.num_attention_heads = 64;
  return use;
}

// 16 bytes a parameter that ranks share, and 6 of two layers and of the embedding.
TEST(DeviceMemory, RanksShareWeightsAndGradients) {
  DeviceMemoryUse use = largest_use();
  const DeviceMemory alone = device_memory(use);
  EXPECT_EQ(alone.gathered, 0);
  use.sharding = Sharding::weights;
  EXPECT_EQ(device_memory(use).total(), alone.total());  // nobody to share with
  const int64_t layer = 5120 * (2 * 8192 + 2 * 1024 + 3 * 25600), table = 151936 * 5120;
  use.other_policies = {use.model};
  for (const int64_t ranks : {2, 8, 64}) {
    use.ranks = ranks;
    const DeviceMemory each = device_memory(use);
    EXPECT_EQ(each.weights, alone.weights / ranks);
    EXPECT_EQ(each.gradients, alone.gradients / ranks);
    EXPECT_EQ(each.moments, alone.moments / ranks);
    EXPECT_EQ(each.gathered, 6 * (2 * layer + table));
    EXPECT_EQ(each.other_policies, 2 * (alone.weights / 4 / ranks + 2 * layer + table));
    EXPECT_EQ(each.activations, alone.activations);
  }
}

TEST(DeviceMemory, ThirtyTwoBillionParametersTrainOnEightGpus) {
  const int64_t free = 139 * kGibi;  // an H200
  DeviceMemoryUse use = largest_use();
  use.ranks = 8;
  expect_words(why_it_does_not_fit(use, free), {"These settings fit:",
                                                "trainer.sharding = \"weights\" and "
                                                "trainer.recompute_activations = \"selective\": "});
  use.sharding = Sharding::weights, use.recompute = Recompute::layer;
  EXPECT_EQ(why_it_does_not_fit(use, free), "");
  use.ranks = 2;
  expect_words(why_it_does_not_fit(use, free),
               {"layers that passes gather", "No settings make it fit", "between more GPUs"});
}

TEST(DeviceMemory, WhereSamplingIsTooMuchServersAreNamed) {
  DeviceMemoryUse use = large_use();
  use.recompute = Recompute::layer, use.optimizer_state = OptimizerState::int8;
  use.sampler = {.engines = 2, .kv_bytes = 20 * kGibi, .max_sequences = 256, .max_rows = 8192};
  expect_words(why_it_does_not_fit(use, 139 * kGibi), {"sampling: weights", "inference.pool"});
  use.optimizer_state = OptimizerState::float32, use.recompute = Recompute::off;
  expect_words(why_it_does_not_fit(use, 139 * kGibi),
               {"inference.pool), with\n", "trainer.optimizer_state = \"int8\""});
  use.sampler.measures_reward = true;
  const std::string supervised = why_it_does_not_fit(use, 139 * kGibi);
  expect_words(supervised, {"without sft.stop_at_reward, with\n"});
  EXPECT_EQ(supervised.find("inference.pool"), std::string::npos) << supervised;
}

}  // namespace
}  // namespace leeway
