// The decoder against slower implementations: one number at a time, and transformers.

#include "torch/torch_decoder.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "leeway/error.h"
#include "model/safetensors.h"
#include "torch/torch_decoder_test_support.h"

namespace leeway {
namespace {

using testing::describe;
using testing::devices;
using testing::gradients_of;
using testing::kFamilies;
using testing::logits_of;
using testing::random_parameters;
using testing::random_tokens;
using testing::small_config;
using torch::Tensor;

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

  // One head's part of a row, normed (if `norm_name` is a parameter) and rotated to its position.
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
  std::string bytes = stored->bytes();
  return at::from_blob(bytes.data(), stored->shape, at::TensorOptions(type)).clone();
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

}  // namespace
}  // namespace leeway
