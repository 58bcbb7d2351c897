// The buffer, its names, and weights from a seed.

#include "model/parameters.h"

#include <cmath>
#include <set>

#include "model/test_files.h"

namespace leeway {
namespace {

using testing::same_bits;
using testing::small_config;
using testing::small_parameters;

std::vector<ModelConfig> all_kinds() {
  std::vector<ModelConfig> list;
  for (const Family family : {Family::qwen3, Family::qwen2, Family::llama}) {
    for (const bool tied : {false, true}) {
      for (const bool bias : {false, true}) list.push_back(small_config(family, tied, bias));
    }
  }
  return list;
}

TEST(Parameters, StartAsZerosEachAtACacheLine) {
  for (const ModelConfig& config : all_kinds()) {
    const Parameters parameters(config);
    for (const float value : parameters.flat()) ASSERT_EQ(value, 0.0f);
    int64_t count = 0;
    const float* end = parameters.flat().data();
    for (size_t i = 0; i < parameters.table().size(); ++i) {
      const std::span<const float> values = parameters.of(i);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(values.data()) % 64, 0u);
      EXPECT_EQ(static_cast<int64_t>(values.size()), parameters.table()[i].size());
      // In order, without overlap, less than a cache line apart.
      EXPECT_GE(values.data(), end);
      EXPECT_LT(values.data(), end + 16);
      end = values.data() + values.size();
      count += parameters.table()[i].size();
    }
    EXPECT_LE(end, parameters.flat().data() + parameters.flat().size());
    EXPECT_EQ(parameters.count(), count);
  }
}

TEST(Parameters, AreFoundByName) {
  Parameters parameters(small_config(Family::qwen3));
  for (size_t i = 0; i < parameters.table().size(); ++i) {
    const std::string& name = parameters.table()[i].name;
    EXPECT_EQ(parameters.find(name), parameters.of(i).data()) << name;
    EXPECT_EQ(std::as_const(parameters).find(name), parameters.of(i).data()) << name;
  }
  for (const char* name : {"", "model", "model.layers.2.mlp.up_proj.weight", "lm_head.bias"}) {
    EXPECT_EQ(parameters.find(name), nullptr) << name;
  }
}

TEST(Parameters, CopiesAreTheirOwn) {
  Parameters first = small_parameters(small_config(Family::llama));
  Parameters second = first;
  EXPECT_TRUE(same_bits(first, second));
  second.of(0)[0] += 1.0f;
  EXPECT_FALSE(same_bits(first, second));
  EXPECT_NE(network_of(first).embedding, network_of(second).embedding);
}

TEST(Parameters, MoreThanTheMachineHasIsRefusedWithItsSize) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers end the program where memory is refused";
#endif
  ModelConfig config = small_config(Family::llama);
  config.vocab_size = int64_t{1} << 30;
  config.hidden_size = int64_t{1} << 20;
  testing::expect_refused([&] { Parameters parameters(config); }, {"no memory for", "GiB"});
}

TEST(Network, PointsAtEveryParameterOnceAndNowhereElse) {
  for (const ModelConfig& config : all_kinds()) {
    const Parameters parameters(config);
    const NetworkPointers<const float> network = network_of(parameters);
    EXPECT_EQ(network.head == network.embedding, config.tie_word_embeddings);
    std::multiset<const float*> found = {network.embedding, network.final_norm};
    if (!config.tie_word_embeddings) found.insert(network.head);
    ASSERT_EQ(static_cast<int64_t>(network.layers.size()), config.num_hidden_layers);
    for (const LayerPointers<const float>& l : network.layers) {
      for (const float* p : {l.input_norm, l.q, l.k, l.v, l.q_bias, l.k_bias, l.v_bias, l.q_norm,
                             l.k_norm, l.o, l.o_bias, l.post_norm, l.gate, l.up, l.down}) {
        if (p != nullptr) found.insert(p);
      }
      EXPECT_EQ(l.q_bias != nullptr, config.qkv_bias);
      EXPECT_EQ(l.o_bias != nullptr, config.output_bias);
      EXPECT_EQ(l.k_norm != nullptr, config.qk_norm);
    }
    std::multiset<const float*> expected;
    for (size_t i = 0; i < parameters.table().size(); ++i) expected.insert(parameters.of(i).data());
    EXPECT_EQ(found, expected);
  }
}

TEST(Network, HasEachWeightInItsPlace) {
  Parameters parameters(small_config(Family::qwen3, false, true));
  const NetworkPointers<float> network = network_of(parameters);
  const std::string layer = "model.layers.1.";
  EXPECT_EQ(network.layers[1].input_norm, parameters.find(layer + "input_layernorm.weight"));
  EXPECT_EQ(network.layers[1].q, parameters.find(layer + "self_attn.q_proj.weight"));
  EXPECT_EQ(network.layers[1].k, parameters.find(layer + "self_attn.k_proj.weight"));
  EXPECT_EQ(network.layers[1].v, parameters.find(layer + "self_attn.v_proj.weight"));
  EXPECT_EQ(network.layers[1].q_bias, parameters.find(layer + "self_attn.q_proj.bias"));
  EXPECT_EQ(network.layers[1].k_bias, parameters.find(layer + "self_attn.k_proj.bias"));
  EXPECT_EQ(network.layers[1].v_bias, parameters.find(layer + "self_attn.v_proj.bias"));
  EXPECT_EQ(network.layers[1].q_norm, parameters.find(layer + "self_attn.q_norm.weight"));
  EXPECT_EQ(network.layers[1].k_norm, parameters.find(layer + "self_attn.k_norm.weight"));
  EXPECT_EQ(network.layers[1].o, parameters.find(layer + "self_attn.o_proj.weight"));
  EXPECT_EQ(network.layers[1].o_bias, parameters.find(layer + "self_attn.o_proj.bias"));
  EXPECT_EQ(network.layers[1].post_norm,
            parameters.find(layer + "post_attention_layernorm.weight"));
  EXPECT_EQ(network.layers[1].gate, parameters.find(layer + "mlp.gate_proj.weight"));
  EXPECT_EQ(network.layers[1].up, parameters.find(layer + "mlp.up_proj.weight"));
  EXPECT_EQ(network.layers[1].down, parameters.find(layer + "mlp.down_proj.weight"));
  EXPECT_EQ(network.head, parameters.find("lm_head.weight"));
  EXPECT_EQ(network.final_norm, parameters.find("model.norm.weight"));
}

// ---------------------------------------------------------------------------------------------
// Weights from a seed

TEST(Initialise, HasTheDeviationOfEachRole) {
  for (ModelConfig config : all_kinds()) {
    // Large enough that the sample deviation is within 3 % of the true one (4 sigma of 1e4 draws).
    config.vocab_size = 300;
    config.hidden_size = 160;
    config.intermediate_size = 256;
    config.head_dim = 40;
    const Parameters parameters = small_parameters(config);
    for (size_t i = 0; i < parameters.table().size(); ++i) {
      const ParameterInfo& info = parameters.table()[i];
      SCOPED_TRACE(info.name);
      const double inputs = static_cast<double>(info.shape.back());
      double expected = 1.0 / std::sqrt(inputs);
      if (info.name.ends_with("o_proj.weight") || info.name.ends_with("down_proj.weight")) {
        expected /= 2.0;  // sqrt(2 * 2 layers)
      }
      if (info.role == ParameterInfo::Role::head) expected *= 0.5;
      if (info.role == ParameterInfo::Role::embedding && !config.tie_word_embeddings)
        expected = 0.1;
      double sum = 0.0, squares = 0.0;
      for (const float v : parameters.of(i)) {
        sum += v;
        squares += static_cast<double>(v) * v;
        if (info.role == ParameterInfo::Role::norm) {
          ASSERT_EQ(v, 1.0f);
        }
        if (info.role == ParameterInfo::Role::bias) {
          ASSERT_EQ(v, 0.0f);
        }
      }
      if (info.role == ParameterInfo::Role::norm || info.role == ParameterInfo::Role::bias)
        continue;
      const double n = static_cast<double>(info.size());
      EXPECT_NEAR(std::sqrt(squares / n), expected, 4.0 * expected / std::sqrt(2.0 * n));
      EXPECT_NEAR(sum / n, 0.0, 4.5 * expected / std::sqrt(n));
    }
  }
}

TEST(Initialise, GivesTheSameWeightsForTheSameSeedAlone) {
  const ModelConfig config = small_config(Family::qwen2);
  const Parameters first = small_parameters(config, 7);
  EXPECT_TRUE(same_bits(first, small_parameters(config, 7)));
  EXPECT_FALSE(same_bits(first, small_parameters(config, 8)));
  // Previous contents do not matter, and padding stays zero.
  Parameters again = small_parameters(config, 9);
  initialise(again, 7);
  EXPECT_TRUE(same_bits(first, again));
}

TEST(Initialise, AParametersValuesDoNotDependOnTheOthers) {
  const Parameters tied = small_parameters(small_config(Family::qwen3, true));
  const Parameters biased = small_parameters(small_config(Family::llama, false, true));
  size_t compared = 0;
  for (size_t i = 0; i < tied.table().size(); ++i) {
    const ParameterInfo& info = tied.table()[i];
    const float* other = biased.find(info.name);
    if (other == nullptr || info.role != ParameterInfo::Role::matrix) continue;
    EXPECT_TRUE(std::equal(tied.of(i).begin(), tied.of(i).end(), other)) << info.name;
    ++compared;
  }
  EXPECT_EQ(compared, 14u);
}

TEST(Initialise, NoTwoMatricesAreAlike) {
  const Parameters parameters = small_parameters(small_config(Family::llama));
  std::set<std::pair<float, float>> starts;
  size_t random = 0;
  for (size_t i = 0; i < parameters.table().size(); ++i) {
    if (parameters.table()[i].role == ParameterInfo::Role::norm) continue;
    // Normalized, since deviations differ.
    const std::span<const float> values = parameters.of(i);
    starts.insert({values[1] / values[0], values[2] / values[0]});
    ++random;
  }
  EXPECT_EQ(starts.size(), random);
}

// Expected values from a few lines in another language that follow the documented rules. The
// tolerance allows for the last digit of a math library.
TEST(Initialise, IsTheSameEverywhere) {
  const Parameters parameters = small_parameters(small_config(Family::llama), 42);
  auto expect = [&](const char* name, float first, float second) {
    const float* values = parameters.find(name);
    EXPECT_NEAR(values[0], first, 1e-8) << name;
    EXPECT_NEAR(values[1], second, 1e-8) << name;
  };
  expect("model.embed_tokens.weight", 0.015080417f, 0.072627582f);
  expect("model.layers.0.self_attn.q_proj.weight", -0.038918901f, -0.243349999f);
  expect("model.layers.1.self_attn.o_proj.weight", 0.021442753f, -0.004716244f);
  expect("model.layers.0.mlp.down_proj.weight", -0.027596312f, -0.002578705f);
  expect("lm_head.weight", -0.06811747f, -0.230124086f);
}

}  // namespace
}  // namespace leeway
