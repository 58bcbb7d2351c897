#include "torch/torch_decoder.h"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <string>

#include "base/thread_pool.h"
#include "leeway/error.h"
#include "model/cpu_decoder.h"
#include "torch/torch_decoder_test_support.h"

namespace leeway {
namespace {

using testing::any_loss;
using testing::describe;
using testing::devices;
using testing::gradients_of;
using testing::kFamilies;
using testing::kLengths;
using testing::logits_of;
using testing::offsets_of;
using testing::random_parameters;
using testing::random_tokens;
using testing::relative_difference;
using testing::small_config;
using torch::Tensor;

// ---------------------------------------------------------------------------------------------
// Properties

TEST(TorchDecoder, SequencesPackedTogetherGiveWhatEachGivesAlone) {
  for (Family family : kFamilies) {
    const ModelConfig config = small_config(family);
    const TorchDecoder decoder(random_parameters(config, 5), at::kCPU, at::kDouble);
    const std::vector<int64_t> offsets = offsets_of(kLengths);
    const Tensor tokens = random_tokens(config, offsets.back(), 6);
    const Tensor together = logits_of(decoder, tokens, offsets);

    std::vector<Tensor> alone;
    for (size_t s = 0; s < kLengths.size(); ++s) {
      alone.push_back(logits_of(decoder, tokens.slice(0, offsets[s], offsets[s + 1]),
                                std::vector<int64_t>{0, kLengths[s]}));
    }
    EXPECT_LT(relative_difference(together, at::cat(alone)), 1e-13) << describe(family);
    const auto packed_gradients = gradients_of(decoder, any_loss(together));
    const auto alone_gradients = gradients_of(decoder, any_loss(at::cat(alone)));
    for (size_t i = 0; i < packed_gradients.size(); ++i) {
      EXPECT_LT(relative_difference(packed_gradients[i], alone_gradients[i]), 1e-11)
          << describe(family) << " " << parameter_table(config)[i].name;
    }
  }
}

TEST(TorchDecoder, IsWhatTheNativeTrainingPathComputes) {
  ThreadPool pool(2);
  for (Family family : kFamilies) {
    const ModelConfig config = small_config(family);
    const Parameters parameters = random_parameters(config, 25);
    const std::vector<int64_t> offsets = offsets_of(kLengths);
    const Tensor tokens = random_tokens(config, offsets.back(), 26);
    const TorchDecoder decoder(parameters, at::kCPU, at::kDouble);
    const Tensor expected = decoder.forward(tokens, offsets, false);
    const Tensor weights =
        at::linspace(-1.0, 1.0, expected.numel(), at::kFloat).view(expected.sizes());
    (expected * weights).sum().backward();
    Parameters expected_gradients(config);
    decoder.copy_gradients_to(expected_gradients);

    const int64_t* data = tokens.data_ptr<int64_t>();
    const std::vector<int32_t> ids(data, data + tokens.numel());
    const PackedTokens batch = {ids, offsets};
    Tensor hidden = at::empty(expected.sizes(), at::kFloat);
    const auto size = static_cast<size_t>(hidden.numel());
    Activations activations;
    training_forward(pool, parameters, batch, {}, {hidden.data_ptr<float>(), size}, &activations);
    EXPECT_LT(relative_difference(hidden, expected), 1e-5) << describe(family);
    Parameters gradients(config);
    training_backward(pool, parameters, batch, {weights.data_ptr<float>(), size}, activations,
                      gradients);
    for (size_t i = 0; i < gradients.table().size(); ++i) {
      auto tensor = [&](Parameters& p) {
        return at::from_blob(p.of(i).data(), p.table()[i].shape, at::TensorOptions(at::kFloat));
      };
      EXPECT_LT(relative_difference(tensor(gradients), tensor(expected_gradients)), 1e-4)
          << describe(family) << " " << gradients.table()[i].name;
    }
  }
}

TEST(TorchDecoder, ALaterTokenChangesNothingBeforeIt) {
  for (Family family : kFamilies) {
    const ModelConfig config = small_config(family);
    const TorchDecoder decoder(random_parameters(config, 7), at::kCPU, at::kDouble);
    const Tensor tokens = random_tokens(config, 12, 8);
    Tensor changed = tokens.clone();
    changed[7] = (changed[7].item<int64_t>() + 1) % config.vocab_size;
    const std::vector<int64_t> cu_seqlens = {0, 12};
    const Tensor a = logits_of(decoder, tokens, cu_seqlens);
    const Tensor b = logits_of(decoder, changed, cu_seqlens);
    EXPECT_TRUE(at::equal(a.slice(0, 0, 7), b.slice(0, 0, 7))) << describe(family);
    for (int64_t t = 7; t < 12; ++t) EXPECT_FALSE(at::equal(a[t], b[t])) << describe(family);
  }
}

TEST(TorchDecoder, RecomputedActivationsGiveTheSameNumbers) {
  for (Family family : kFamilies) {
    for (at::ScalarType compute : {at::kDouble, at::kFloat, at::kBFloat16}) {
      const ModelConfig config = small_config(family);
      const TorchDecoder decoder(random_parameters(config, 9), at::kCPU, compute);
      const std::vector<int64_t> offsets = offsets_of(kLengths);
      const Tensor tokens = random_tokens(config, offsets.back(), 10);
      const Tensor kept = logits_of(decoder, tokens, offsets, false);
      const Tensor recomputed = logits_of(decoder, tokens, offsets, true);
      EXPECT_TRUE(at::equal(kept, recomputed)) << describe(family);
      const auto kept_gradients = gradients_of(decoder, any_loss(kept));
      const auto recomputed_gradients = gradients_of(decoder, any_loss(recomputed));
      for (size_t i = 0; i < kept_gradients.size(); ++i) {
        EXPECT_TRUE(at::equal(kept_gradients[i], recomputed_gradients[i]))
            << describe(family) << " " << parameter_table(config)[i].name;
        EXPECT_GT(kept_gradients[i].abs().max().item<double>(), 0.0);
      }
    }
  }
}

// Operations that keep something for the backward pass of `output`.
size_t recorded_operations(const Tensor& output) {
  std::set<torch::autograd::Node*> seen;
  std::vector<torch::autograd::Node*> open = {output.grad_fn().get()};
  while (!open.empty()) {
    torch::autograd::Node* node = open.back();
    open.pop_back();
    if (node == nullptr || !seen.insert(node).second) continue;
    for (const torch::autograd::Edge& edge : node->next_edges()) {
      open.push_back(edge.function.get());
    }
  }
  return seen.size();
}

TEST(TorchDecoder, RecomputationKeepsOneOperationOfEachLayer) {
  auto recorded = [](int64_t layers, bool recompute) {
    ModelConfig config = small_config(Family::qwen3);
    config.num_hidden_layers = layers;
    const Parameters parameters = random_parameters(config, 27);
    const TorchDecoder decoder(parameters, at::kCPU, at::kFloat);
    const Tensor hidden =
        decoder.forward(random_tokens(config, 6, 28), std::vector<int64_t>{0, 6}, recompute);
    return recorded_operations(hidden) - parameters.table().size();  // less a node for each leaf
  };
  EXPECT_EQ(recorded(4, true), recorded(2, true) + 2);
  EXPECT_GT(recorded(4, false), recorded(2, false) + 40);
}

TEST(TorchDecoder, RecomputationLeavesFrozenParametersWithoutGradient) {
  const ModelConfig config = small_config(Family::qwen2);
  const TorchDecoder decoder(random_parameters(config, 11), at::kCPU, at::kDouble);
  for (size_t i = 0; i < decoder.parameters().size(); i += 2) {
    decoder.parameters()[i].set_requires_grad(false);
  }
  const Tensor tokens = random_tokens(config, 12, 12);
  any_loss(logits_of(decoder, tokens, std::vector<int64_t>{0, 5, 12}, true)).backward();
  for (size_t i = 0; i < decoder.parameters().size(); ++i) {
    EXPECT_EQ(decoder.parameters()[i].grad().defined(), i % 2 == 1)
        << parameter_table(config)[i].name;
  }
}

TEST(TorchDecoder, WeightsChangedBeforeARecomputingBackwardPassAreAnError) {
  const ModelConfig config = small_config(Family::llama);
  const TorchDecoder decoder(random_parameters(config, 13), at::kCPU, at::kDouble);
  const Tensor tokens = random_tokens(config, 8, 14);
  const Tensor loss = any_loss(logits_of(decoder, tokens, std::vector<int64_t>{0, 8}, true));
  {
    const at::NoGradGuard guard;
    Tensor(decoder.parameters()[3]).mul_(2.0);
  }
  EXPECT_THROW(loss.backward(), c10::Error);
}

// Along a random direction in parameter space, the loss changes as the gradient predicts.
TEST(TorchDecoder, GradientsAreSlopesOfTheLoss) {
  for (Family family : kFamilies) {
    ModelConfig config = small_config(family);
    config.output_bias = config.qkv_bias = family != Family::qwen3;
    const TorchDecoder decoder(random_parameters(config, 15), at::kCPU, at::kDouble);
    const std::vector<int64_t> offsets = offsets_of(kLengths);
    const Tensor tokens = random_tokens(config, offsets.back(), 16);
    const auto gradients = gradients_of(decoder, any_loss(logits_of(decoder, tokens, offsets)));

    const at::NoGradGuard guard;
    Rng rng(17);
    for (size_t i = 0; i < gradients.size(); ++i) {
      Tensor weight = decoder.parameters()[i];
      Tensor direction = at::empty_like(weight);
      for (int64_t j = 0; j < weight.numel(); ++j) direction.data_ptr<double>()[j] = rng.normal();
      constexpr double kStep = 1e-5;
      auto loss_at = [&](double step) {
        const Tensor before = weight.clone();
        weight.add_(direction, step);
        const double loss = any_loss(logits_of(decoder, tokens, offsets)).item<double>();
        weight.copy_(before);
        return loss;
      };
      const double slope = (loss_at(kStep) - loss_at(-kStep)) / (2 * kStep);
      const double expected = (gradients[i] * direction).sum().item<double>();
      EXPECT_NEAR(slope, expected, 1e-5 * (1.0 + std::abs(expected)))
          << describe(family) << " " << parameter_table(config)[i].name;
    }
  }
}

TEST(TorchDecoder, HalfPrecisionComputesWithFloat32Masters) {
  for (const torch::Device& device : devices()) {
    for (Family family : kFamilies) {
      const ModelConfig config = small_config(family);
      const std::string where = device.str() + " " + describe(family);
      const Parameters parameters = random_parameters(config, 19);
      const TorchDecoder exact(parameters, device, at::kFloat);
      const TorchDecoder half(parameters, device, at::kBFloat16);
      const std::vector<int64_t> offsets = offsets_of(kLengths);
      const Tensor tokens = random_tokens(config, offsets.back(), 20).to(device);
      const Tensor hidden = half.forward(tokens, offsets, false);
      EXPECT_EQ(hidden.scalar_type(), at::kBFloat16) << where;
      EXPECT_EQ(half.head_weight().scalar_type(), at::kBFloat16) << where;
      const Tensor expected = exact.forward(tokens, offsets, false);
      EXPECT_LT(relative_difference(hidden.to(at::kFloat), expected), 0.03) << where;

      const Tensor weights =
          at::linspace(-1.0, 1.0, expected.numel(), expected.options()).view(expected.sizes());
      (hidden.to(at::kFloat) * weights).sum().backward();
      (expected * weights).sum().backward();
      for (size_t i = 0; i < half.parameters().size(); ++i) {
        const Tensor &found = half.parameters()[i].grad(), &wanted = exact.parameters()[i].grad();
        const ParameterInfo& info = parameters.table()[i];
        // An untied head is not part of this loss.
        ASSERT_EQ(found.defined(), info.role != ParameterInfo::Role::head) << where;
        if (!found.defined()) continue;
        EXPECT_EQ(found.scalar_type(), at::kFloat) << where << " " << info.name;
        EXPECT_LT(relative_difference(found, wanted), 0.1) << where << " " << info.name;
      }
    }
  }
}

TEST(TorchDecoder, PassesReadWeightsThatHaveChanged) {
  for (const torch::Device& device : devices()) {
    for (Family family : kFamilies) {
      const ModelConfig config = small_config(family);
      const Parameters first = random_parameters(config, 31),
                       second = random_parameters(config, 32);
      const std::vector<int64_t> offsets = offsets_of(kLengths);
      const Tensor tokens = random_tokens(config, offsets.back(), 33).to(device);
      const TorchDecoder expected(second, device, at::kBFloat16);
      TorchDecoder copied(first, device, at::kBFloat16), stepped(first, device, at::kBFloat16);
      copied.copy_from(second);
      {
        const at::NoGradGuard guard;
        for (size_t i = 0; i < first.table().size(); ++i) {
          Tensor(stepped.parameters()[i]).copy_(expected.parameters()[i]);
        }
      }
      stepped.weights_changed();
      for (const TorchDecoder* decoder : {&copied, &stepped}) {
        EXPECT_TRUE(at::equal(decoder->forward(tokens, offsets, false),
                              expected.forward(tokens, offsets, false)));
        EXPECT_TRUE(at::equal(decoder->head_weight(), expected.head_weight()));
      }
    }
  }
}

TEST(TorchDecoder, WithoutTrainingItHasTheSameNumbersAndNoGraph) {
  for (const torch::Device& device : devices()) {
    for (const at::ScalarType compute : {at::kFloat, at::kBFloat16}) {
      const ModelConfig config = small_config(Family::qwen2);
      const Parameters parameters = random_parameters(config, 34);
      const std::vector<int64_t> offsets = offsets_of(kLengths);
      const Tensor tokens = random_tokens(config, offsets.back(), 35).to(device);
      const TorchDecoder trains(parameters, device, compute);
      const TorchDecoder scores(parameters, device, compute, false);
      const Tensor hidden = scores.forward(tokens, offsets, false);
      EXPECT_FALSE(hidden.requires_grad());
      EXPECT_EQ(scores.parameters()[0].scalar_type(), compute);
      EXPECT_TRUE(at::equal(hidden, trains.forward(tokens, offsets, false)));
      EXPECT_TRUE(at::equal(scores.head_weight(), trains.head_weight()));
    }
  }
}

TEST(TorchDecoder, WeightsAndGradientsComeBackAsTheyAre) {
  const ModelConfig config = small_config(Family::llama);
  const Parameters parameters = random_parameters(config, 21);
  for (at::ScalarType compute : {at::kDouble, at::kFloat, at::kBFloat16}) {
    const TorchDecoder decoder(parameters, at::kCPU, compute);
    Parameters copy(config), gradients(config);
    decoder.copy_to(copy);
    EXPECT_TRUE(std::ranges::equal(copy.flat(), parameters.flat()));

    for (float& value : gradients.flat()) value = 7.0f;
    const Tensor tokens = random_tokens(config, 9, 22);
    decoder.forward(tokens, std::vector<int64_t>{0, 9}, false).sum().backward();
    decoder.copy_gradients_to(gradients);
    for (size_t i = 0; i < gradients.table().size(); ++i) {
      const Tensor& leaf = decoder.parameters()[i];
      const Tensor expected =
          leaf.grad().defined() ? leaf.grad().to(at::kFloat).contiguous() : at::zeros(leaf.sizes());
      const float* data = expected.data_ptr<float>();
      EXPECT_TRUE(std::ranges::equal(gradients.of(i), std::span(data, gradients.of(i).size())))
          << gradients.table()[i].name;
    }
    EXPECT_FALSE(decoder.parameters().back().grad().defined());  // the untied head
  }
}

TEST(TorchDecoder, RefusesOffsetsThatDoNotCoverTheTokens) {
  const ModelConfig config = small_config(Family::qwen3);
  const TorchDecoder decoder(random_parameters(config, 23), at::kCPU, at::kFloat);
  auto message = [&](int64_t tokens, const std::vector<int64_t>& cu_seqlens) -> std::string {
    try {
      decoder.forward(random_tokens(config, tokens, 24), cu_seqlens, false);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(message(4, {0, 1, 4}), "");
  for (const std::vector<int64_t>& bad :
       {std::vector<int64_t>{}, {0}, {1, 4}, {0, 3}, {0, 5}, {4, 0}}) {
    EXPECT_NE(message(4, bad).find("from 0 to the number of tokens, 4"), std::string::npos);
  }
  EXPECT_NE(message(4, {0, 2, 2, 4}).find("sequence 1 has 0 tokens"), std::string::npos);
  EXPECT_NE(message(4, {0, 3, 2, 4}).find("sequence 1 has -1 tokens"), std::string::npos);
  EXPECT_NE(message(66, {0, 1, 66}).find("sequence 1 has 65 tokens"), std::string::npos);
}

}  // namespace
}  // namespace leeway
