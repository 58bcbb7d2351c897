// Low-rank adapters: their matrices, what they compute, and their gradients against those of a
// model whose matrices include them.

#include "model/lora.h"

#include <cmath>
#include <numeric>

#include "model/cpu_decoder.h"
#include "model/test_files.h"

namespace leeway {
namespace {

using testing::same_bits;
using testing::small_config;

const std::vector<std::string> kAll(kLoraTargets.begin(), kLoraTargets.end());

std::shared_ptr<const Parameters> base_of(Family family, bool tied = false, bool bias = false) {
  Parameters base = testing::small_parameters(small_config(family, tied, bias));
  testing::roughen(base, 2);
  return std::make_shared<const Parameters>(std::move(base));
}

Parameters adapter_over(std::shared_ptr<const Parameters> base,
                        const std::vector<std::string>& targets, bool learned) {
  Parameters adapter(std::move(base),
                     {.rank = 3, .alpha = 4.0, .targets = targets, .base_path = ""});
  initialise(adapter, 5);
  Rng rng(6);
  for (float& value : adapter.flat()) {
    if (learned) value = static_cast<float>(0.3 * rng.normal());
  }
  return adapter;
}

// The model whose matrices are W + scale B A, summed in double.
Parameters dense_of(const Parameters& adapter) {
  Parameters dense = *adapter.base();
  const int64_t rank = adapter.lora()->rank;
  for (size_t i = 0; i < dense.table().size(); ++i) {
    const ParameterInfo& info = dense.table()[i];
    const std::string module = info.name.substr(0, info.name.size() - 7);  // without ".weight"
    const float* a = adapter.find(lora_a_name(module));
    const float* b = adapter.find(lora_b_name(module));
    if (a == nullptr) continue;
    const int64_t outputs = info.shape[0], inputs = info.shape[1];
    for (int64_t o = 0; o < outputs; ++o) {
      for (int64_t j = 0; j < inputs; ++j) {
        double sum = 0.0;
        for (int64_t r = 0; r < rank; ++r) {
          sum += static_cast<double>(b[o * rank + r]) * a[r * inputs + j];
        }
        float& w = dense.of(i)[static_cast<size_t>(o * inputs + j)];
        w = static_cast<float>(w + adapter.lora()->alpha / static_cast<double>(rank) * sum);
      }
    }
  }
  return dense;
}

struct Batch {
  std::vector<int32_t> tokens;
  std::vector<int64_t> cu_seqlens{0};
  PackedTokens packed() const { return {tokens, cu_seqlens}; }
};

Batch some_batch(std::vector<int64_t> lengths, uint64_t seed = 9) {
  Batch batch;
  Rng rng(seed);
  for (const int64_t length : lengths) {
    for (int64_t i = 0; i < length; ++i)
      batch.tokens.push_back(static_cast<int32_t>(rng.below(50)));
    batch.cu_seqlens.push_back(static_cast<int64_t>(batch.tokens.size()));
  }
  return batch;
}

std::vector<float> hidden_of(const Parameters& weights, const Batch& batch) {
  ThreadPool pool(2);
  std::vector<float> hidden(batch.tokens.size() * 24);
  training_forward(pool, weights, batch.packed(), {}, hidden, nullptr);
  return hidden;
}

// Adds the gradients of sum(hidden * some fixed numbers).
void add_gradients(const Parameters& weights, const Batch& batch, const TrainingOptions& options,
                   uint64_t seed, Parameters& gradients) {
  ThreadPool pool(2);
  std::vector<float> hidden(batch.tokens.size() * 24), dhidden(hidden.size());
  Rng rng(seed);
  for (float& value : dhidden) value = static_cast<float>(rng.normal());
  Activations activations;
  training_forward(pool, weights, batch.packed(), options, hidden, &activations);
  training_backward(pool, weights, batch.packed(), dhidden, activations, gradients);
}

TEST(Lora, HasTwoMatricesOfEachTargetInEachLayer) {
  const ModelConfig config = small_config(Family::qwen3);
  const auto table = lora_table(
      config, {.rank = 3, .alpha = 1, .targets = {"k_proj", "down_proj"}, .base_path = ""});
  ASSERT_EQ(table.size(), 8u);
  EXPECT_EQ(table[0].name, "model.layers.0.self_attn.k_proj.lora_A.weight");
  EXPECT_EQ(table[0].shape, (std::vector<int64_t>{3, 24}));
  EXPECT_EQ(table[1].name, "model.layers.0.self_attn.k_proj.lora_B.weight");
  EXPECT_EQ(table[1].shape, (std::vector<int64_t>{16, 3}));
  EXPECT_EQ(table[7].name, "model.layers.1.mlp.down_proj.lora_B.weight");
  EXPECT_EQ(table[7].shape, (std::vector<int64_t>{24, 3}));
}

TEST(Lora, TargetsAreOrderedAndDistinct) {
  EXPECT_EQ(ordered_targets({"up_proj", "q_proj", "up_proj", "lm_head"}),
            (std::vector<std::string>{"q_proj", "up_proj"}));
}

// Uniform numbers have a standard deviation of bound / sqrt(3); 10 % is five times what chance
// does to 144 of them.
TEST(Lora, BeginsAsPeftDoesAndDependsOnTheSeed) {
  const auto base = base_of(Family::qwen3);
  const Parameters adapter = adapter_over(base, kAll, false);
  for (size_t i = 0; i < adapter.table().size(); ++i) {
    const ParameterInfo& info = adapter.table()[i];
    double squares = 0.0;
    for (const float value : adapter.of(i)) {
      squares += static_cast<double>(value) * value;
      if (!is_lora_a(info.name)) {
        EXPECT_EQ(value, 0.0f);
      } else {
        EXPECT_LE(std::abs(value), 1.0 / std::sqrt(static_cast<double>(info.shape[1])));
      }
    }
    if (!is_lora_a(info.name)) continue;
    const double deviation = std::sqrt(squares / static_cast<double>(adapter.of(i).size()));
    EXPECT_NEAR(deviation * std::sqrt(3.0 * static_cast<double>(info.shape[1])), 1.0, 0.25)
        << info.name;
  }
  Parameters other = adapter;
  initialise(other, 5);
  EXPECT_TRUE(same_bits(other, adapter));
  initialise(other, 6);
  EXPECT_FALSE(same_bits(other, adapter));
}

TEST(Lora, SharesItsBase) {
  const auto base = base_of(Family::llama);
  const Parameters adapter = adapter_over(base, {"q_proj"}, true);
  const Parameters copy = adapter;
  EXPECT_EQ(copy.base().get(), base.get());
  EXPECT_EQ(copy.find("model.norm.weight"), base->find("model.norm.weight"));
  EXPECT_LT(adapter.count(), base->count() / 10);
  const Parameters gradients = Parameters::zeros_like(adapter);
  EXPECT_EQ(gradients.base(), nullptr);
  EXPECT_EQ(gradients.find("model.norm.weight"), nullptr);
  EXPECT_EQ(gradients.count(), adapter.count());
}

TEST(Lora, AnAdapterThatHasLearnedNothingHasTheBitsOfItsBase) {
  for (const Family family : {Family::qwen3, Family::qwen2, Family::llama}) {
    const auto base = base_of(family, true);
    const Batch batch = some_batch({17, 5});
    const auto with = hidden_of(adapter_over(base, kAll, false), batch);
    EXPECT_EQ(with, hidden_of(*base, batch));
  }
}

// Both sum in float32, in different orders: a few ulps of numbers around one per layer.
TEST(Lora, ComputesWhatAModelWithTheUpdatedMatricesDoes) {
  for (const Family family : {Family::qwen3, Family::qwen2, Family::llama}) {
    for (const auto& targets : {kAll, std::vector<std::string>{"v_proj", "down_proj"}}) {
      const Parameters adapter = adapter_over(base_of(family, false, true), targets, true);
      const Batch batch = some_batch({17, 5, 1});
      const auto low_rank = hidden_of(adapter, batch), dense = hidden_of(dense_of(adapter), batch);
      double worst = 0.0;
      for (size_t i = 0; i < dense.size(); ++i) {
        worst = std::max(worst, static_cast<double>(std::abs(dense[i] - low_rank[i])));
      }
      EXPECT_LT(worst, 1e-4);
      EXPECT_GT(worst, 0.0);
    }
  }
}

// W' = W + s B A, so dA = s B^T dW' and dB = s dW' A^T.
TEST(Lora, GradientsAreThoseOfTheDenseModelByTheChainRule) {
  for (const Family family : {Family::qwen3, Family::qwen2, Family::llama}) {
    for (const bool recompute : {false, true}) {
      const Parameters adapter = adapter_over(base_of(family, false, true), kAll, true);
      const Parameters dense = dense_of(adapter);
      const Batch batch = some_batch({17, 5, 1});
      const TrainingOptions options{.recompute_activations = recompute};
      Parameters got = Parameters::zeros_like(adapter), whole(dense.config());
      add_gradients(adapter, batch, options, 3, got);
      add_gradients(dense, batch, options, 3, whole);
      const int64_t rank = adapter.lora()->rank;
      const double scale = adapter.lora()->alpha / static_cast<double>(rank);
      for (size_t i = 0; i < got.table().size(); ++i) {
        const ParameterInfo& info = got.table()[i];
        const std::string module = info.name.substr(0, info.name.rfind(".lora_"));
        const float* a = adapter.find(lora_a_name(module));
        const float* b = adapter.find(lora_b_name(module));
        const float* dw = std::as_const(whole).find(module + ".weight");
        const bool is_a = is_lora_a(info.name);
        int64_t in = 0, out = 0;
        for (const ParameterInfo& each : dense.table()) {
          if (each.name == module + ".weight") out = each.shape[0], in = each.shape[1];
        }
        double largest = 0.0, worst = 0.0;
        for (int64_t row = 0; row < info.shape[0]; ++row) {
          for (int64_t column = 0; column < info.shape[1]; ++column) {
            double wanted = 0.0;
            if (is_a) {
              for (int64_t o = 0; o < out; ++o) {
                wanted += static_cast<double>(b[o * rank + row]) * dw[o * in + column];
              }
            } else {
              for (int64_t j = 0; j < in; ++j) {
                wanted += static_cast<double>(dw[row * in + j]) * a[column * in + j];
              }
            }
            wanted *= scale;
            const double is = got.of(i)[static_cast<size_t>(row * info.shape[1] + column)];
            largest = std::max(largest, std::abs(wanted));
            worst = std::max(worst, std::abs(wanted - is));
          }
        }
        EXPECT_GT(largest, 0.0) << info.name;
        // float32 over 23 rows through two layers.
        EXPECT_LT(worst, 2e-4 * largest + 1e-5) << info.name;
      }
    }
  }
}

// Gradients sum over tokens in order: sequences together, or one after the other.
TEST(Lora, GradientsDoNotDependOnHowABatchIsCut) {
  const Parameters adapter = adapter_over(base_of(Family::qwen3), kAll, true);
  const Batch both = some_batch({17, 5});
  Batch first, second;
  first.tokens.assign(both.tokens.begin(), both.tokens.begin() + 17);
  first.cu_seqlens = {0, 17};
  second.tokens.assign(both.tokens.begin() + 17, both.tokens.end());
  second.cu_seqlens = {0, 5};
  ThreadPool pool(2);
  std::vector<float> dhidden(22 * 24);
  Rng rng(3);
  for (float& value : dhidden) value = static_cast<float>(rng.normal());
  const auto add = [&](const Batch& batch, std::span<const float> d, Parameters& gradients) {
    std::vector<float> hidden(d.size());
    Activations activations;
    training_forward(pool, adapter, batch.packed(), {}, hidden, &activations);
    training_backward(pool, adapter, batch.packed(), d, activations, gradients);
  };
  Parameters whole = Parameters::zeros_like(adapter), parts = whole;
  add(both, dhidden, whole);
  add(first, std::span<const float>(dhidden).first(17 * 24), parts);
  add(second, std::span<const float>(dhidden).subspan(17 * 24), parts);
  EXPECT_TRUE(same_bits(whole, parts));
}

// A decoder that has the base packs the adapter alone, and forgets nothing of the base.
TEST(Lora, ASamplerTakesAdaptersOverOneBaseAndFullWeightsInTurn) {
  const auto base = base_of(Family::qwen2, false);
  const ModelConfig& config = base->config();
  ThreadPool pool(2);
  const std::vector<int32_t> tokens{3, 1, 4, 1, 5};
  const std::vector<int32_t> rows{4};
  const int32_t block = 0;
  const SequenceRows sequence{0, 5, 0, &block};
  const auto logits_of = [&](SamplingDecoder& decoder, const Parameters& weights) {
    decoder.load(pool, weights);
    KvStore kv(config, 1);
    std::vector<float> logits(static_cast<size_t>(config.vocab_size));
    decoder.run(pool, tokens, {&sequence, 1}, kv, rows, logits.data());
    return logits;
  };
  const Parameters adapter = adapter_over(base, {"q_proj", "down_proj"}, true);
  const Parameters other = adapter_over(base, kAll, true);
  for (const Precision precision : {Precision::float32, Precision::bf16, Precision::int8}) {
    for (const FrozenWeights frozen : {FrozenWeights::packed, FrozenWeights::in_place}) {
      SamplingDecoder decoder(config, precision, frozen);
      const auto fresh = [&](const Parameters& weights) {
        SamplingDecoder one(config, precision, FrozenWeights::packed);
        return logits_of(one, weights);
      };
      EXPECT_EQ(logits_of(decoder, adapter), fresh(adapter));
      const size_t bytes = decoder.weight_bytes();
      EXPECT_EQ(logits_of(decoder, other), fresh(other));
      EXPECT_EQ(logits_of(decoder, *base), fresh(*base));
      EXPECT_EQ(logits_of(decoder, adapter), fresh(adapter));
      const bool no_copy = frozen == FrozenWeights::in_place && precision == Precision::float32;
      // Panels are 32 outputs wide, so that an adapter of a small rank takes more than its numbers.
      if (no_copy) {
        EXPECT_LT(bytes, static_cast<size_t>(base->count()) * 4);
      }
    }
  }
}

}  // namespace
}  // namespace leeway
