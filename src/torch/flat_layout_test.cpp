#include "torch/flat_layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "torch/flat_adamw.h"
#include "torch/torch_decoder_test_support.h"

namespace leeway {
namespace {

using at::Tensor;
using testing::devices;
using testing::kFamilies;
using testing::random_parameters;
using testing::small_config;

TEST(FlatLayout, GivesEveryParameterItsOwnPlaceWithMatricesFirst) {
  for (const Family family : kFamilies) {
    const FlatLayout layout(small_config(family));
    const Tensor flat = at::zeros({layout.size}, at::kFloat);
    for (const Tensor& view : parameter_views(layout, flat)) view.add_(1.0);
    EXPECT_EQ(flat.max().item<float>(), 1.0f);
    int64_t numbers = 0;
    for (size_t i = 0; i < layout.table.size(); ++i) {
      const ParameterInfo& info = layout.table[i];
      const bool matrix =
          info.role != ParameterInfo::Role::norm && info.role != ParameterInfo::Role::bias;
      EXPECT_EQ(layout.offsets[i] + info.size() <= layout.decaying, matrix) << info.name;
      numbers += info.size();
    }
    EXPECT_EQ(flat.sum().item<double>(), static_cast<double>(numbers));
    EXPECT_EQ(layout.decaying % 64, 0);
  }
}

// Ranges and norms are all there is, and parts of ranks cut them without a rest.
TEST(FlatLayout, HasTheMatricesOfALayerInOneRange) {
  for (const Family family : kFamilies) {
    for (const bool tied : {false, true}) {
      ModelConfig config = small_config(family);
      config.tie_word_embeddings = tied;
      const FlatLayout layout(config);
      const NetworkRanges ranges = network_ranges(layout);
      std::vector<FlatRange> all = ranges.layers;
      all.push_back(ranges.embedding);
      if (!tied) all.push_back(ranges.head);
      std::ranges::sort(all, {}, &FlatRange::begin);
      int64_t end = 0;
      for (const FlatRange& range : all) {
        EXPECT_EQ(range.begin, end);
        end += range.count;
      }
      EXPECT_EQ(end, layout.decaying);
      EXPECT_EQ(tied, ranges.head.begin == ranges.embedding.begin);
      for (const int ranks : {1, 2, 8}) {
        int64_t cut = 0;
        for (const FlatRange& range : all) {
          const std::vector<int64_t> bounds = layout.bounds_of(range, ranks);
          ASSERT_EQ(bounds.size(), static_cast<size_t>(ranks) + 1);
          EXPECT_EQ(bounds.front(), 0);
          EXPECT_EQ(bounds.back(), range.count);
          EXPECT_TRUE(std::ranges::is_sorted(bounds));
          for (int r = 0; r < ranks; ++r) {
            if (bounds[r] == bounds[r + 1]) continue;
            const FlatRange part = layout.part_of(r, ranks);
            EXPECT_GE(range.begin + bounds[r], part.begin);
            EXPECT_LE(range.begin + bounds[r + 1], part.begin + part.count);
            cut += bounds[r + 1] - bounds[r];
          }
        }
        EXPECT_EQ(cut, layout.decaying);
      }
    }
  }
}

TEST(FlatLayout, StandsForStackedMatricesAndReturnsWhatWasCopiedIn) {
  for (const Family family : kFamilies) {
    const ModelConfig config = small_config(family);
    const Parameters parameters = random_parameters(config, 3);
    const FlatLayout layout(config);
    const Tensor flat = at::zeros({layout.size}, at::kFloat);
    copy_to_flat(layout, parameters, flat);
    Parameters back(config);
    copy_to_host(layout, flat, back);
    EXPECT_TRUE(std::ranges::equal(back.flat(), parameters.flat()));

    const NetworkTensors network = network_views(layout, flat);
    const auto named = [&](const std::string& name) {
      for (size_t i = 0; i < layout.table.size(); ++i) {
        if (layout.table[i].name == name) return parameter_views(layout, flat)[i];
      }
      return Tensor();
    };
    EXPECT_TRUE(network.head.equal(config.tie_word_embeddings ? network.embedding
                                                              : named("lm_head.weight")));
    EXPECT_TRUE(network.final_norm.equal(named("model.norm.weight")));
    for (size_t i = 0; i < network.layers.size(); ++i) {
      const std::string layer = "model.layers." + std::to_string(i) + ".";
      const auto stacked = [&](const std::string& part, const std::vector<std::string>& names,
                               const std::string& kind) {
        std::vector<Tensor> parts;
        for (const std::string& name : names) {
          parts.push_back(named(layer + part + name + "_proj." + kind));
        }
        return at::cat(parts);
      };
      EXPECT_TRUE(network.layers[i].qkv.equal(stacked("self_attn.", {"q", "k", "v"}, "weight")));
      EXPECT_TRUE(network.layers[i].gate_up.equal(stacked("mlp.", {"gate", "up"}, "weight")));
      EXPECT_TRUE(network.layers[i].down.equal(named(layer + "mlp.down_proj.weight")));
      EXPECT_EQ(network.layers[i].qkv_bias.defined(), config.qkv_bias);
      if (config.qkv_bias) {
        EXPECT_TRUE(
            network.layers[i].qkv_bias.equal(stacked("self_attn.", {"q", "k", "v"}, "bias")));
      }
    }
  }
}

TEST(FlatAdamW, IsTheFormulaAndRoundsTheCopy) {
  for (const torch::Device& device : devices()) {
    const int64_t size = 64 * 37;
    const at::TensorOptions numbers = at::TensorOptions(device).dtype(at::kFloat);
    at::manual_seed(3);
    FlatAdamW tensors;
    tensors.parameters = at::randn({size}, numbers), tensors.gradients = at::randn({size}, numbers);
    tensors.moments.first = at::randn({size}, numbers);
    tensors.moments.second = at::rand({size}, numbers);
    tensors.copy = at::zeros({size}, numbers.dtype(at::kBFloat16));
    tensors.decaying = 64 * 5;
    const auto wide = [](const Tensor& x) { return x.to(at::kCPU, at::kDouble, false, true); };
    Tensor p = wide(tensors.parameters), m = wide(tensors.moments.first);
    Tensor v = wide(tensors.moments.second);
    OptimizerTable table;
    table.weight_decay = 0.3;
    const double rate = 0.01, scale = 0.25;
    const int64_t step = 3;
    const Tensor g = wide(tensors.gradients) * scale;
    m.mul_(table.beta1).add_(g, 1.0 - table.beta1);
    v.mul_(table.beta2).add_(g * g, 1.0 - table.beta2);
    p.narrow(0, 0, tensors.decaying).mul_(1.0 - rate * table.weight_decay);
    p -= rate * (m / (1.0 - std::pow(table.beta1, step))) /
         ((v / (1.0 - std::pow(table.beta2, step))).sqrt() + table.epsilon);

    adamw_step(tensors, table, step, rate, scale);
    EXPECT_LT((wide(tensors.parameters) - p).abs().max().item<double>(), 1e-5) << device.str();
    EXPECT_LT((wide(tensors.moments.first) - m).abs().max().item<double>(), 1e-5) << device.str();
    EXPECT_LT((wide(tensors.moments.second) - v).abs().max().item<double>(), 1e-5) << device.str();
    EXPECT_TRUE(tensors.copy.equal(tensors.parameters.to(at::kBFloat16))) << device.str();
  }
}

TEST(FlatAdamW, NormIsThatOfAllNumbersAndNotFiniteWhereOneIsNot) {
  for (const torch::Device& device : devices()) {
    for (const int64_t size : {int64_t{1}, int64_t{63}, int64_t{65536}, int64_t{200001}}) {
      at::manual_seed(size);
      const Tensor x = at::randn({size}, at::TensorOptions(device).dtype(at::kFloat)) * 1e18;
      const double expected = x.to(at::kDouble).norm().item<double>();
      EXPECT_NEAR(norm_of(x), expected, 1e-10 * expected) << device.str() << " " << size;
      EXPECT_EQ(norm_of(x), norm_of(x));
      for (const float bad :
           {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
        x.narrow(0, size - 1, 1).fill_(bad);
        EXPECT_FALSE(std::isfinite(norm_of(x))) << device.str() << " " << size;
      }
    }
  }
}

}  // namespace
}  // namespace leeway
