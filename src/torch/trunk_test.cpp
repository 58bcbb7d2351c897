// The trunk against the decoder and autograd, on the CPU and on CUDA where there is one.

#include "torch/trunk.h"

#include <gtest/gtest.h>

#include "leeway/error.h"
#include "torch/torch_decoder_test_support.h"
#include "torch/training_operations.h"

namespace leeway {
namespace {

using testing::any_gradient;
using testing::describe;
using testing::devices;
using testing::gradients_of;
using testing::kFamilies;
using testing::kLengths;
using testing::offsets_of;
using testing::random_parameters;
using testing::random_tokens;
using testing::relative_difference;
using testing::small_config;
using torch::Tensor;

Trunk trunk_of(const TorchDecoder& decoder) {
  return Trunk(decoder.config(), network_views(decoder.layout(), decoder.flat_weights()),
               decoder.rope_table());
}

struct Case {
  Family family;
  bool tied;
  Recompute recompute;
  std::vector<int64_t> lengths;

  std::string name() const {
    return describe(family) + (tied ? ", tied" : "") + ", recompute " + name_of(recompute) + ", " +
           std::to_string(lengths.size()) + " sequences";
  }
};

std::vector<Case> cases() {
  std::vector<Case> list;
  for (const Family family : kFamilies) {
    list.push_back({family, false, Recompute::off, kLengths});
    list.push_back({family, true, Recompute::layer, kLengths});
    list.push_back({family, false, Recompute::selective, kLengths});
    list.push_back({family, true, Recompute::off, {7, 7, 7}});
  }
  return list;
}

struct Found {
  Tensor hidden;
  std::vector<Tensor> gradients;
};

Found by_autograd(const TorchDecoder& decoder, const Case& c, const Tensor& tokens) {
  const Tensor hidden = decoder.forward(tokens, offsets_of(c.lengths), false);
  return {hidden.detach(),
          torch::autograd::grad({hidden}, decoder.parameters(), {any_gradient(hidden)},
                                /*retain_graph=*/false, false, true)};
}

Found by_trunk(const TorchDecoder& decoder, const Case& c, const Tensor& tokens, bool are_new) {
  const Trunk trunk = trunk_of(decoder);
  const FlatLayout& layout = decoder.layout();
  const at::ScalarType wide =
      decoder.flat_weights().scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const Tensor flat = at::zeros({layout.size}, at::TensorOptions(tokens.device()).dtype(wide));
  const NetworkTensors gradients = network_views(layout, flat);
  if (are_new) {
    for (const LayerTensors& layer : gradients.layers) {
      for (const Tensor& matrix : {layer.qkv, layer.o, layer.gate_up, layer.down})
        matrix.fill_(7.0);
    }
  }
  TrunkRecord record;
  const Tensor hidden = trunk.forward(tokens, offsets_of(c.lengths), c.recompute, &record);
  trunk.backward(std::move(record), any_gradient(hidden), gradients, are_new);
  return {hidden, parameter_views(layout, flat)};
}

ModelConfig config_of(const Case& c) {
  ModelConfig config = small_config(c.family);
  config.tie_word_embeddings = c.tied;
  return config;
}

void expect_near(const Found& got, const Found& expected, const FlatLayout& layout,
                 double tolerance, const std::string& where) {
  EXPECT_LT(relative_difference(got.hidden.to(at::kDouble), expected.hidden.to(at::kDouble)),
            tolerance)
      << where;
  for (size_t i = 0; i < layout.table.size(); ++i) {
    const std::string name = where + ", " + layout.table[i].name;
    if (!expected.gradients[i].defined()) {  // the head's
      EXPECT_EQ(got.gradients[i].abs().max().item<double>(), 0.0) << name;
      continue;
    }
    EXPECT_LT(relative_difference(got.gradients[i].to(at::kDouble),
                                  expected.gradients[i].to(at::kDouble)),
              tolerance)
        << name;
  }
}

TEST(Trunk, GivesTheHiddenStatesAndGradientsOfTheDecoder) {
  for (const torch::Device& device : devices()) {
    const at::ScalarType type = device.is_cpu() ? at::kDouble : at::kFloat;
    for (const Case& c : cases()) {
      const ModelConfig config = config_of(c);
      const TorchDecoder decoder(random_parameters(config, 5), device, type);
      const Tensor tokens = random_tokens(config, offsets_of(c.lengths).back(), 6).to(device);
      const Found expected = by_autograd(decoder, c, tokens);
      for (const bool are_new : {false, true}) {
        expect_near(by_trunk(decoder, c, tokens, are_new), expected, decoder.layout(),
                    device.is_cpu() ? 1e-11 : 1e-4, device.str() + ", " + c.name());
      }
    }
  }
}

// In bf16 both round, each in its own places: errors are those against float32.
TEST(Trunk, IsInHalfPrecisionAsCloseAsTheDecoder) {
  for (const torch::Device& device : devices()) {
    for (const Case& c : cases()) {
      const ModelConfig config = config_of(c);
      const Parameters parameters = random_parameters(config, 5);
      const TorchDecoder exact(parameters, device, at::kFloat);
      const TorchDecoder half(parameters, device, at::kBFloat16);
      const Tensor tokens = random_tokens(config, offsets_of(c.lengths).back(), 6).to(device);
      const Found expected = by_autograd(exact, c, tokens);
      const Found got = by_trunk(half, c, tokens, false), other = by_autograd(half, c, tokens);
      const auto error = [](const Tensor& x, const Tensor& y) {
        return relative_difference(x.to(at::kDouble), y.to(at::kDouble));
      };
      EXPECT_LT(error(got.hidden, expected.hidden),
                2.0 * error(other.hidden, expected.hidden) + 1e-3);
      for (size_t i = 0; i < expected.gradients.size(); ++i) {
        if (!expected.gradients[i].defined()) continue;  // the head's
        EXPECT_LT(error(got.gradients[i], expected.gradients[i]),
                  2.0 * error(other.gradients[i], expected.gradients[i]) + 0.01)
            << device.str() << ", " << c.name() << ", " << exact.layout().table[i].name;
      }
    }
  }
}

// Long enough for the kernels of long sequences, which the models above are not.
TEST(Trunk, AttentionOfLongSequencesHasTheGradientOfTheFormula) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no GPU";
  const torch::Device device(at::kCUDA, 0);
  ModelConfig config = small_config(Family::llama);
  config.max_position_embeddings = 4096;
  const std::shared_ptr<cuda::AttentionGradients> by_cudnn = make_attention_gradients(device);
  for (const std::vector<int64_t>& lengths :
       {std::vector<int64_t>{2048, 1500, 700, 130, 1},
        {2048, 2048, 2048},
        {3000},
        {1153, 1160, 1190, 1200, 1250, 1408, 1270, 1279, 1280, 1281, 1300, 1350}}) {
    const std::vector<int64_t> offsets = offsets_of(lengths);
    const PackedSequences sequences(config, offsets, offsets.back(), device);
    at::manual_seed(3);
    const auto random = [&](int64_t heads) {
      return at::randn({offsets.back(), heads, 64}, at::TensorOptions(device)).to(at::kBFloat16);
    };
    const Tensor q = random(4), k = random(2), v = random(2), d_out = random(4);
    const auto wide = [](const Tensor& x) { return x.to(at::kFloat); };
    const Attended expected = attention(sequences, wide(q), wide(k), wide(v));
    const HeadGradients by_formula =
        attention_backward(nullptr, sequences, wide(q), wide(k), wide(v), expected, wide(d_out));
    const Attended got = attention(sequences, q, k, v);
    EXPECT_LT(relative_difference(wide(got.out), expected.out), 0.01) << lengths.size();
    EXPECT_LT(relative_difference(got.lse, expected.lse), 1e-4) << lengths.size();
    // By PyTorch's kernels, and by cuDNN itself where the build has it.
    for (const auto& prepared : {std::shared_ptr<cuda::AttentionGradients>(), by_cudnn}) {
      const HeadGradients d = attention_backward(prepared.get(), sequences, q, k, v, got, d_out);
      const std::string where =
          std::to_string(lengths.size()) + (prepared == nullptr ? "" : ", by cuDNN");
      EXPECT_LT(relative_difference(wide(d.q), by_formula.q), 0.02) << where;
      EXPECT_LT(relative_difference(wide(d.k), by_formula.k), 0.02) << where;
      EXPECT_LT(relative_difference(wide(d.v), by_formula.v), 0.02) << where;
    }
  }
}

TEST(Trunk, AddsToGradientsAndKeepsNothingOfAPassWithoutRecord) {
  const Case c{Family::qwen3, true, Recompute::off, kLengths};
  const ModelConfig config = config_of(c);
  const TorchDecoder decoder(random_parameters(config, 5), at::kCPU, at::kDouble);
  const Trunk trunk = trunk_of(decoder);
  const Tensor tokens = random_tokens(config, offsets_of(c.lengths).back(), 6);
  const Found once = by_trunk(decoder, c, tokens, false);
  EXPECT_TRUE(trunk.forward(tokens, offsets_of(c.lengths)).equal(once.hidden));

  const Tensor flat = at::zeros({decoder.layout().size}, at::kDouble);
  for (int pass = 0; pass < 2; ++pass) {
    TrunkRecord record;
    const Tensor hidden = trunk.forward(tokens, offsets_of(c.lengths),
                                        pass == 1 ? Recompute::layer : Recompute::off, &record);
    trunk.backward(std::move(record), any_gradient(hidden), network_views(decoder.layout(), flat));
  }
  const std::vector<Tensor> twice = parameter_views(decoder.layout(), flat);
  for (size_t i = 0; i < twice.size(); ++i) {
    EXPECT_LT(relative_difference(twice[i], 2.0 * once.gradients[i]), 1e-12)
        << decoder.layout().table[i].name;
  }
}

TEST(Trunk, WhateverIsRecomputedGivesTheSameGradientsBitForBit) {
  for (const at::ScalarType type : {at::kDouble, at::kFloat, at::kBFloat16}) {
    for (const Family family : kFamilies) {
      Case c{family, false, Recompute::off, kLengths};
      const ModelConfig config = config_of(c);
      const TorchDecoder decoder(random_parameters(config, 5), at::kCPU, type);
      const Tensor tokens = random_tokens(config, offsets_of(c.lengths).back(), 6);
      const Found kept = by_trunk(decoder, c, tokens, true);
      for (const Recompute recompute : {Recompute::selective, Recompute::layer}) {
        c.recompute = recompute;
        const Found again = by_trunk(decoder, c, tokens, true);
        EXPECT_TRUE(again.hidden.equal(kept.hidden)) << c.name();
        for (size_t i = 0; i < kept.gradients.size(); ++i) {
          EXPECT_TRUE(again.gradients[i].equal(kept.gradients[i]))
              << c.name() << ", " << decoder.layout().table[i].name;
        }
      }
    }
  }
}

TEST(Trunk, ARecordHasWhatIsNotRecomputed) {
  const ModelConfig config = small_config(Family::qwen3);
  const TorchDecoder decoder(random_parameters(config, 5), at::kCPU, at::kFloat);
  const Trunk trunk = trunk_of(decoder);
  const Tensor tokens = random_tokens(config, 10, 6);
  for (const Recompute recompute : {Recompute::off, Recompute::selective, Recompute::layer}) {
    TrunkRecord record;
    trunk.forward(tokens, std::vector<int64_t>{0, 10}, recompute, &record);
    for (const TrunkRecord::Layer& layer : record.layers) {
      EXPECT_TRUE(layer.x.defined());
      EXPECT_EQ(layer.gate_up.defined(), recompute == Recompute::off);
      for (const Tensor& kept : {layer.qkv, layer.attended, layer.lse, layer.y}) {
        EXPECT_EQ(kept.defined(), recompute != Recompute::layer);
      }
    }
  }
}

TEST(Trunk, RefusesSequencesThatDoNotFit) {
  const ModelConfig config = small_config(Family::llama);
  const TorchDecoder decoder(random_parameters(config, 5), at::kCPU, at::kFloat);
  const Trunk trunk = trunk_of(decoder);
  const Tensor tokens = random_tokens(config, 10, 6);
  for (const std::vector<int64_t>& wrong :
       {std::vector<int64_t>{0, 9}, {0, 10, 10}, {0, 12}, {1, 10}, {}}) {
    EXPECT_THROW(trunk.forward(tokens, wrong), Error);
  }
}

}  // namespace
}  // namespace leeway
