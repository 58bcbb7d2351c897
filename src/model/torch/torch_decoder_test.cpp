#include "model/torch/torch_decoder.h"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <string>

#include "base/rng.h"
#include "base/thread_pool.h"
#include "leeway/error.h"
#include "model/cpu_decoder.h"
#include "model/safetensors.h"

namespace leeway {
namespace {

using torch::Tensor;

// ---------------------------------------------------------------------------------------------
// Models made here: small, with sizes that differ from each other and several groups of heads

ModelConfig small_config(Family family) {
  ModelConfig config;
  config.family = family;
  config.vocab_size = 37;
  config.hidden_size = 24;
  config.intermediate_size = 40;
  config.num_hidden_layers = 2;
  config.num_attention_heads = 6;
  config.num_key_value_heads = 2;
  config.head_dim = 8;
  config.max_position_embeddings = 64;
  config.qk_norm = family == Family::qwen3;
  config.qkv_bias = family == Family::qwen2;
  config.tie_word_embeddings = family == Family::qwen2;
  if (family == Family::llama) config.llama3_rope = Llama3Rope{8.0, 1.0, 4.0, 32};
  return config;
}

// Norms and biases are random too, so that nothing is hidden by a one or a zero.
Parameters random_parameters(const ModelConfig& config, uint64_t seed) {
  Parameters parameters(config);
  Rng rng(seed);
  for (size_t i = 0; i < parameters.table().size(); ++i) {
    const bool is_norm = parameters.table()[i].role == ParameterInfo::Role::norm;
    for (float& value : parameters.of(i)) {
      value = static_cast<float>(is_norm ? 1.0 + 0.3 * rng.normal() : 0.3 * rng.normal());
    }
  }
  return parameters;
}

const std::vector<int64_t> kLengths = {1, 9, 3, 14};

std::vector<int64_t> offsets_of(const std::vector<int64_t>& lengths) {
  std::vector<int64_t> offsets = {0};
  for (int64_t length : lengths) offsets.push_back(offsets.back() + length);
  return offsets;
}

Tensor random_tokens(const ModelConfig& config, int64_t count, uint64_t seed) {
  Rng rng(seed);
  Tensor tokens = at::empty({count}, at::kLong);
  for (int64_t t = 0; t < count; ++t) {
    tokens.data_ptr<int64_t>()[t] =
        static_cast<int64_t>(rng.below(static_cast<uint64_t>(config.vocab_size)));
  }
  return tokens;
}

Tensor logits_of(const TorchDecoder& decoder, const Tensor& tokens,
                 std::span<const int64_t> cu_seqlens, bool recompute = false) {
  return at::matmul(decoder.forward(tokens, cu_seqlens, recompute), decoder.head_weight().t());
}

// A loss that looks at every logit, each with another weight.
Tensor any_loss(const Tensor& logits) {
  return (at::log_softmax(logits, -1) *
          at::linspace(-1.0, 2.0, logits.numel(), logits.options()).sin().view(logits.sizes()))
      .sum();
}

// Gradients of all parameters; the leaves' own are left as they were.
std::vector<Tensor> gradients_of(const TorchDecoder& decoder, const Tensor& loss) {
  return torch::autograd::grad({loss}, decoder.parameters());
}

std::vector<torch::Device> devices() {
  std::vector<torch::Device> list = {at::kCPU};
  if (at::hasCUDA()) list.emplace_back(at::kCUDA, 0);
  return list;
}

double relative_difference(const Tensor& a, const Tensor& b) {
  return ((a - b).norm() / (b.norm() + 1e-30)).item<double>();
}

const std::vector<Family> kFamilies = {Family::qwen3, Family::qwen2, Family::llama};

std::string describe(Family family) {
  return family == Family::qwen3 ? "qwen3" : family == Family::qwen2 ? "qwen2" : "llama";
}

// ---------------------------------------------------------------------------------------------
// The network once more, one number at a time, in double

class PlainReference {
 public:
  explicit PlainReference(const Parameters& parameters) : parameters_(parameters) {}

  // hidden [tokens, hidden_size] of one sequence.
  std::vector<std::vector<double>> hidden(const std::vector<int64_t>& tokens) {
    const ModelConfig& c = parameters_.config();
    std::vector<std::vector<double>> x;
    for (int64_t id : tokens) {
      const float* row = weight("model.embed_tokens.weight") + id * c.hidden_size;
      x.emplace_back(row, row + c.hidden_size);
    }
    for (int64_t l = 0; l < c.num_hidden_layers; ++l) run_layer(l, x);
    for (auto& row : x) row = norm(row, weight("model.norm.weight"));
    return x;
  }

 private:
  using Row = std::vector<double>;

  const float* weight(const std::string& name) const {
    const float* found = parameters_.find(name);
    EXPECT_NE(found, nullptr) << name;
    return found;
  }

  Row norm(const Row& x, const float* w) const {
    double squares = 0.0;
    for (double value : x) squares += value * value;
    const double scale = 1.0 / std::sqrt(squares / static_cast<double>(x.size()) +
                                         parameters_.config().rms_norm_eps);
    Row y(x.size());
    for (size_t i = 0; i < x.size(); ++i) y[i] = x[i] * scale * w[i];
    return y;
  }

  Row multiply(const std::string& name, const Row& x, int64_t outputs) const {
    const float* w = weight(name + ".weight");
    const float* bias = parameters_.find(name + ".bias");
    Row y(static_cast<size_t>(outputs));
    for (size_t o = 0; o < y.size(); ++o) {
      y[o] = bias == nullptr ? 0.0 : bias[o];
      for (size_t i = 0; i < x.size(); ++i) y[o] += w[o * x.size() + i] * x[i];
    }
    return y;
  }

  double frequency(int64_t i) const {
    const ModelConfig& c = parameters_.config();
    const double plain =
        std::pow(c.rope_theta, -2.0 * static_cast<double>(i) / static_cast<double>(c.head_dim));
    if (!c.llama3_rope) return plain;
    const double wavelength = 2.0 * M_PI / plain;
    const double context = static_cast<double>(c.llama3_rope->original_max_position_embeddings);
    const double low = c.llama3_rope->low_freq_factor, high = c.llama3_rope->high_freq_factor;
    if (wavelength < context / high) return plain;
    if (wavelength > context / low) return plain / c.llama3_rope->factor;
    const double share = (context / wavelength - low) / (high - low);
    return (1.0 - share) * plain / c.llama3_rope->factor + share * plain;
  }

  // One head's part of a row, normed (if `norm_name` is a parameter) and turned to its position.
  Row head(const Row& row, int64_t index, const std::string& norm_name, size_t position) const {
    const int64_t dim = parameters_.config().head_dim, half = dim / 2;
    Row x(row.begin() + index * dim, row.begin() + (index + 1) * dim);
    if (const float* w = parameters_.find(norm_name)) x = norm(x, w);
    Row y(x.size());
    for (int64_t i = 0; i < half; ++i) {
      const double angle = static_cast<double>(position) * frequency(i);
      const double a = x[static_cast<size_t>(i)], b = x[static_cast<size_t>(i + half)];
      y[static_cast<size_t>(i)] = a * std::cos(angle) - b * std::sin(angle);
      y[static_cast<size_t>(i + half)] = b * std::cos(angle) + a * std::sin(angle);
    }
    return y;
  }

  void run_layer(int64_t l, std::vector<Row>& x) const {
    const ModelConfig& c = parameters_.config();
    const std::string at = "model.layers." + std::to_string(l) + ".";
    const std::string self = at + "self_attn.";
    const auto dim = static_cast<size_t>(c.head_dim);
    std::vector<Row> q, k, v;
    for (const Row& row : x) {
      const Row h = norm(row, weight(at + "input_layernorm.weight"));
      q.push_back(multiply(self + "q_proj", h, c.num_attention_heads * c.head_dim));
      k.push_back(multiply(self + "k_proj", h, c.num_key_value_heads * c.head_dim));
      v.push_back(multiply(self + "v_proj", h, c.num_key_value_heads * c.head_dim));
    }
    for (size_t t = 0; t < x.size(); ++t) {
      Row attended(q[t].size(), 0.0);
      for (int64_t n = 0; n < c.num_attention_heads; ++n) {
        const int64_t kv = n * c.num_key_value_heads / c.num_attention_heads;
        const Row query = head(q[t], n, self + "q_norm.weight", t);
        Row shares;
        double total = 0.0;
        for (size_t s = 0; s <= t; ++s) {
          const Row key = head(k[s], kv, self + "k_norm.weight", s);
          double score = 0.0;
          for (size_t i = 0; i < dim; ++i) score += query[i] * key[i];
          shares.push_back(std::exp(score / std::sqrt(static_cast<double>(dim))));
          total += shares.back();
        }
        for (size_t s = 0; s <= t; ++s) {
          for (size_t i = 0; i < dim; ++i) {
            attended[static_cast<size_t>(n) * dim + i] +=
                shares[s] / total * v[s][static_cast<size_t>(kv) * dim + i];
          }
        }
      }
      const Row o = multiply(self + "o_proj", attended, c.hidden_size);
      for (size_t i = 0; i < o.size(); ++i) x[t][i] += o[i];
      const Row h = norm(x[t], weight(at + "post_attention_layernorm.weight"));
      Row gate = multiply(at + "mlp.gate_proj", h, c.intermediate_size);
      const Row up = multiply(at + "mlp.up_proj", h, c.intermediate_size);
      for (size_t i = 0; i < gate.size(); ++i) gate[i] = gate[i] / (1 + std::exp(-gate[i])) * up[i];
      const Row down = multiply(at + "mlp.down_proj", gate, c.hidden_size);
      for (size_t i = 0; i < down.size(); ++i) x[t][i] += down[i];
    }
  }

  const Parameters& parameters_;
};

TEST(TorchDecoder, IsTheNetworkWrittenOutOneNumberAtATime) {
  for (Family family : kFamilies) {
    for (bool output_bias : {false, true}) {
      ModelConfig config = small_config(family);
      config.output_bias = output_bias;
      if (output_bias) config.qkv_bias = true;
      const Parameters parameters = random_parameters(config, 3);
      const TorchDecoder decoder(parameters, at::kCPU, at::kDouble);
      const Tensor tokens = random_tokens(config, 21, 4);
      const Tensor hidden = decoder.forward(tokens, std::vector<int64_t>{0, 21}, false);
      const int64_t* ids = tokens.data_ptr<int64_t>();
      const auto expected = PlainReference(parameters).hidden({ids, ids + 21});
      for (int64_t t = 0; t < 21; ++t) {
        for (int64_t i = 0; i < config.hidden_size; ++i) {
          // The angles are rounded to float32.
          ASSERT_NEAR(hidden[t][i].item<double>(),
                      expected[static_cast<size_t>(t)][static_cast<size_t>(i)], 2e-5)
              << describe(family) << " token " << t;
        }
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------
// Against transformers

Tensor tensor_of(const SafetensorsFile& file, const std::string& name) {
  const StoredTensor* stored = file.find(name);
  LEEWAY_CHECK(stored != nullptr, name);
  const at::ScalarType type = stored->dtype == DType::i64 ? at::kLong : at::kFloat;
  return at::from_blob(const_cast<std::byte*>(stored->bytes.data()), stored->shape,
                       at::TensorOptions(type))
      .clone();
}

// Whole tensors by their norm; single numbers beside the largest of their tensor.
void expect_close_gradient(const Tensor& found, const Tensor& expected, const std::string& where) {
  const Tensor difference = (found.to(at::kDouble) - expected.to(at::kDouble)).abs();
  EXPECT_LT((difference.norm() / expected.norm()).item<double>(), 1e-4) << where;
  const Tensor allowed = expected.abs() * 1e-3 + expected.abs().max() * 1e-5;
  EXPECT_TRUE((difference <= allowed).all().item<bool>())
      << where << ": off by " << difference.max().item<double>();
}

class Goldens : public ::testing::TestWithParam<std::tuple<const char*, at::ScalarType>> {};

TEST_P(Goldens, LogitsLogProbabilitiesAndGradientsAreThoseOfTransformers) {
  const auto& [name, compute] = GetParam();
  const std::string folder = std::string(LEEWAY_SOURCE_DIR) + "/tests/data/hf/" + name;
  const SafetensorsFile golden(folder + "/golden.safetensors");
  for (const torch::Device& device : devices()) {
    const TorchDecoder decoder(load_parameters(folder), device, compute);
    const Tensor ids = tensor_of(golden, "input_ids").to(device);  // [2, 96]

    const std::vector<int64_t> cu_seqlens = {0, 96, 192};
    const Tensor logits = logits_of(decoder, ids.flatten(), cu_seqlens).view({2, 96, -1});
    EXPECT_LT((logits.cpu() - tensor_of(golden, "logits")).abs().max().item<double>(), 2e-5);

    const Tensor targets = ids.slice(1, 1).unsqueeze(2);
    const Tensor logprobs =
        at::log_softmax(logits.slice(1, 0, 95), -1).gather(2, targets).squeeze(2).cpu();
    EXPECT_LT((logprobs - tensor_of(golden, "logprobs")).abs().max().item<double>(), 2e-5);

    const Tensor weights = at::linspace(-1.0, 1.0, 190, logprobs.options()).view({2, 95});
    const std::vector<Tensor> gradients = gradients_of(decoder, (logprobs * weights).sum());
    const std::vector<ParameterInfo> table = parameter_table(decoder.config());
    ASSERT_EQ(gradients.size(), table.size());
    for (size_t i = 0; i < table.size(); ++i) {
      expect_close_gradient(gradients[i].cpu(), tensor_of(golden, "grad." + table[i].name),
                            device.str() + " " + table[i].name);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(TorchDecoder, Goldens,
                         ::testing::Combine(::testing::Values("qwen3-tied", "llama3-rope"),
                                            ::testing::Values(at::kDouble, at::kFloat)),
                         [](const auto& tested) {
                           std::string name = std::get<0>(tested.param);
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name + (std::get<1>(tested.param) == at::kDouble ? "_float64"
                                                                                   : "_float32");
                         });

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

// Along a random direction in the space of all parameters, the loss rises as the gradient says.
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
        // An untied head is no part of this loss.
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
