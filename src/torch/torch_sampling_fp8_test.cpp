// The engine on a torch device in fp8: against a computation in float64 over what the codes stand
// for, beside bf16, and from one set of weights to the next. Runs on the CPU, and on CUDA if
// available.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "engine/test_support.h"
#include "torch/coded_operations.h"
#include "torch/device_weights.h"
#include "torch/fp8_test_support.h"
#include "torch/layer_rows.h"
#include "torch/torch_sampling.h"

namespace leeway {
namespace {

using namespace testing;
using at::Tensor;

// Sizes that are multiples of 16, and a vocabulary of 8: else the head's products depend on the
// number of rows.
ModelConfig fp8_config(Family family) {
  ModelConfig config = tiny(family);
  config.vocab_size = 64, config.hidden_size = 64, config.intermediate_size = 96,
  config.head_dim = 16;
  return config;
}

Parameters fp8_weights(Family family, uint64_t seed) {
  Parameters weights = small_parameters(fp8_config(family), seed);
  roughen(weights, seed);
  return weights;
}

EngineOptions on(at::Device device, bool fp8, int64_t rows = 40, bool graphs = true) {
  EngineOptions options = options_of(rows);
  options.backend = make_torch_sampling(device, at::kBFloat16, {.graphs = graphs, .fp8 = fp8});
  return options;
}

// ---------------------------------------------------------------------------------------------
// The definition

// A decoder of one sequence in float64, with numbers rounded to bf16 where a pass stores them.
class Definition {
 public:
  Definition(const Parameters& weights, bool fp8)
      : config_(weights.config()),
        fp8_(fp8),
        layout_(config_),
        flat_(at::zeros({layout_.size}, at::kFloat)),
        rope_(config_, at::kCPU) {
    copy_to_flat(layout_, weights, flat_);
    flat_ = stored(flat_.to(at::kDouble));
    network_ = network_views(layout_, flat_);
  }

  // Logits after every token. [ids, vocabulary]
  Tensor logits(const std::vector<int32_t>& ids) const {
    const auto count = static_cast<int64_t>(ids.size());
    const int64_t dim = config_.head_dim, heads = config_.num_attention_heads;
    const int64_t kv_heads = config_.num_key_value_heads;
    const Tensor positions = at::arange(count, at::kInt);
    const Tensor hidden_keys = at::ones({count, count}, at::kBool).triu(1);
    const auto by_head = [&](const Tensor& rows, int64_t of) {
      return rows.view({count, of, dim});
    };
    Tensor x = network_.embedding.index_select(0, at::tensor(ids, at::kInt));
    for (const LayerTensors& layer : network_.layers) {
      const Tensor qkv = product(normed(x, layer.input_norm), layer.qkv, layer.qkv_bias);
      Tensor q = by_head(qkv.narrow(1, 0, heads * dim).contiguous(), heads);
      Tensor k = by_head(qkv.narrow(1, heads * dim, kv_heads * dim).contiguous(), kv_heads);
      const Tensor v =
          by_head(qkv.narrow(1, (heads + kv_heads) * dim, kv_heads * dim).contiguous(), kv_heads);
      if (layer.q_norm.defined()) q = normed(q, layer.q_norm), k = normed(k, layer.k_norm);
      q = stored(plain_rope(q, positions, rope_.cosines, rope_.sines));
      k = stored(plain_rope(k, positions, rope_.cosines, rope_.sines));
      const auto for_queries = [&](const Tensor& of) {  // [heads, count, dim]
        return of.repeat_interleave(heads / kv_heads, 1).transpose(0, 1);
      };
      const Tensor scores = at::matmul(q.transpose(0, 1), for_queries(k).transpose(1, 2)) /
                            std::sqrt(static_cast<double>(dim));
      const Tensor shares = at::softmax(
          scores.masked_fill(hidden_keys, -std::numeric_limits<double>::infinity()), -1);
      const Tensor attention =
          stored(at::matmul(shares, for_queries(v)).transpose(0, 1).flatten(1));
      x = stored(x + product(attention, layer.o, layer.o_bias));
      const std::vector<Tensor> halves =
          product(normed(x, layer.post_norm), layer.gate_up, Tensor()).chunk(2, 1);
      const Tensor s = stored(stored(at::silu(halves[0])) * halves[1]);
      x = stored(x + product(s, layer.down, Tensor()));
    }
    return at::mm(normed(x, network_.final_norm), network_.head.t());
  }

  // As they are recorded: of logits in bf16, with the token's own as it is.
  static double logprob(const Tensor& logits, int32_t id) {
    Tensor rounded = stored(logits);
    rounded[id] = logits[id];
    return at::log_softmax(rounded, 0)[id].item<double>();
  }

 private:
  static Tensor stored(const Tensor& x) { return x.to(at::kBFloat16).to(at::kDouble); }
  Tensor normed(const Tensor& x, const Tensor& weight) const {
    const Tensor inverse = at::rsqrt(x.square().mean(-1, true) + config_.rms_norm_eps);
    return stored(stored(x * inverse) * weight);
  }
  Tensor stands_for(const Tensor& x) const {
    if (!fp8_) return x;
    CodedTensor coded = empty_coded(x.size(0), x.size(1), at::kCPU);
    code_rows(x.to(at::kFloat), coded);
    return decoded(coded).to(at::kDouble);
  }
  Tensor product(const Tensor& x, const Tensor& weight, const Tensor& bias) const {
    Tensor y = at::mm(stands_for(x), stands_for(weight).t());
    if (bias.defined()) y = y + bias;
    return stored(y);
  }

  ModelConfig config_;
  bool fp8_;
  FlatLayout layout_;
  Tensor flat_;
  TorchRopeTable rope_;
  NetworkTensors network_;
};

std::vector<Request> requests_of(int64_t tokens) {
  std::vector<Request> requests;
  for (const int64_t prompt : {1, 5, 17, 40}) {
    requests.push_back(make_request(prompt, tokens, 2, static_cast<uint64_t>(prompt)));
  }
  return requests;
}

// What an engine recorded, less a definition's log-probabilities, of all tokens.
std::vector<double> differences(const Results& results, const std::vector<Request>& requests,
                                const Definition& definition) {
  std::vector<double> all;
  for (const auto& [key, sample] : results) {
    const std::vector<int32_t>& prompt = requests[static_cast<size_t>(key.first)].prompt;
    std::vector<int32_t> ids = prompt;
    ids.insert(ids.end(), sample.ids.begin(), sample.ids.end());
    const Tensor logits = definition.logits(ids);
    for (size_t i = 0; i < sample.ids.size(); ++i) {
      const auto row = static_cast<int64_t>(prompt.size() + i) - 1;
      const double expected = Definition::logprob(logits[row], sample.ids[i]);
      all.push_back(std::abs(expected - double{sample.raw_logprobs[i]}));
    }
  }
  return all;
}
double mean(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

std::vector<Parameters> assorted_weights() {
  std::vector<Parameters> all;
  for (const Family family : kFamilies) {
    for (const bool bias : {false, true}) {
      ModelConfig config = fp8_config(family);
      config.qkv_bias = config.qkv_bias || bias;
      config.output_bias = family != Family::qwen2 && bias;
      all.push_back(small_parameters(config, 4));
      roughen(all.back(), 4);
    }
  }
  return all;
}

// On the CPU sums are float32, which hardly ever rounds to another bf16 number than float64. Where
// it does, codes change, and everything after them: one-token prompts have few numbers where that
// can happen. Elsewhere logits differ by what float32 rounds, and recorded ones in bf16 hardly
// ever.
TEST(Fp8Sampling, RecordsTheLogprobsOfItsCodes) {
  for (const Parameters& weights : assorted_weights()) {
    std::vector<Request> requests;
    for (int32_t id = 0; id < 50; ++id) {
      requests.push_back(make_request(1, 1, 1, static_cast<uint64_t>(id)));
      requests.back().prompt = {id};
    }
    const Results results = run_all(weights, on(at::kCPU, true), requests);
    const auto near = [&](bool fp8) {
      const std::vector<double> all = differences(results, requests, Definition(weights, fp8));
      return std::ranges::count_if(all, [](double x) { return x < 1e-4; });
    };
    EXPECT_GE(near(true), 42) << name_of(weights.config().family);
    EXPECT_LE(near(false), 25) << name_of(weights.config().family);
  }
}

// In a sequence all bits of bf16 come to differ, on tensor cores at once: noise of 2^-9, which
// moves one in 64 numbers to the next code. A step is sqrt(12) times the error of codes, so that
// this noise is sqrt(12 / 64) of what all codes make: 0.43.
TEST(Fp8Sampling, IsNearerToWhatItsCodesStandForThanToBf16) {
  for (const at::Device device : fp8_devices()) {
    for (const Parameters& weights : assorted_weights()) {
      const std::vector<Request> requests = requests_of(12);
      const Results results = run_all(weights, on(device, true), requests);
      const double own = mean(differences(results, requests, Definition(weights, true)));
      const double bf16 = mean(differences(results, requests, Definition(weights, false)));
      EXPECT_LT(own, 0.7 * bf16) << device.str() << " " << name_of(weights.config().family);
    }
  }
}

// Inputs and weights have an error of up to 1/16, 0.026 of them in the mean square; sums of
// products average it, and each of the few layers adds its own: 4 to 10 % of logits that are
// about 1.
TEST(Fp8Sampling, IsNearBf16) {
  for (const at::Device device : fp8_devices()) {
    for (const Family family : kFamilies) {
      const Parameters weights = fp8_weights(family, 3);
      const std::vector<Request> requests = requests_of(12);
      const Results results = run_all(weights, on(device, true), requests);
      const double difference = mean(differences(results, requests, Definition(weights, false)));
      SCOPED_TRACE(fmt::format("{} {}: {:.4f}", device.str(), name_of(family), difference));
      EXPECT_GT(difference, 1e-3);
      EXPECT_LT(difference, 0.15);
    }
  }
}

TEST(Fp8Sampling, RepeatsARun) {
  for (const at::Device device : fp8_devices()) {
    const Parameters weights = fp8_weights(Family::llama, 3);
    const Results once = run_all(weights, on(device, true, 20), assorted(8, 9));
    const Results again = run_all(weights, on(device, true, 20), assorted(8, 9));
    ASSERT_EQ(once.size(), again.size());
    for (const auto& [key, result] : once) expect_same(again.at(key), result);
  }
}

TEST(Fp8Sampling, ASampleDoesNotDependOnWhatIsBesideIt) {
#ifdef LEEWAY_CUDA
  const std::vector<at::Device> devices = fp8_devices();
  if (devices.size() < 2) GTEST_SKIP() << "no GPU with fp8";
  ModelConfig config = fp8_config(Family::qwen3);
  config.head_dim = 64;
  Parameters weights = small_parameters(config, 5);
  roughen(weights, 5);
  const std::vector<Request> requests = requests_of(20);
  const Results together = run_all(weights, on(devices[1], true, 64), requests);
  for (const int64_t rows : {3, 16}) {
    const Results in_pieces = run_all(weights, on(devices[1], true, rows), requests);
    for (const auto& [key, result] : together) expect_same(in_pieces.at(key), result);
  }
  const Results without_graphs = run_all(weights, on(devices[1], true, 64, false), requests);
  for (const auto& [key, result] : together) expect_same(without_graphs.at(key), result);
#else
  GTEST_SKIP() << "no GPU: products of ATen on the CPU depend on the number of rows";
#endif
}

// ---------------------------------------------------------------------------------------------
// Weights

std::shared_ptr<const PolicySnapshot> on_device(const Parameters& weights, at::Device device,
                                                at::ScalarType type) {
  const FlatLayout layout(weights.config());
  const Tensor flat = at::zeros({layout.size}, at::device(device).dtype(type));
  copy_to_flat(layout, weights, flat);
  return std::make_shared<const PolicySnapshot>(
      weights.config(), std::make_unique<TorchDeviceWeights>(layout, flat), 2);
}

TEST(Fp8Sampling, HasNewWeightsAfterASwapFromTheHostOrTheDevice) {
  for (const at::Device device : fp8_devices()) {
    const Parameters first = fp8_weights(Family::qwen2, 2), second = fp8_weights(Family::qwen2, 7);
    const std::vector<Request> requests = requests_of(8);
    const Results before = run_all(first, on(device, true), requests);
    const Results expected = run_all(second, on(device, true), requests);
    const auto at_host =
        std::make_shared<const PolicySnapshot>(std::make_shared<const Parameters>(second), 2);
    for (const auto& snapshot : {at_host, on_device(second, device, at::kFloat),
                                 on_device(second, device, at::kBFloat16)}) {
      Engine engine(first, 1, on(device, true));
      for (const Request& request : requests) engine.submit(request);
      for (const auto& [key, sample] : run_to_the_end(engine)) expect_same(sample, before.at(key));
      engine.update_weights(snapshot);
      for (const Request& request : requests) engine.submit(request);
      for (const auto& [key, sample] : run_to_the_end(engine)) {
        const auto count = static_cast<int64_t>(requests.size());
        const SampledSequence& as_new = expected.at({key.first - count, key.second});
        expect_same(sample, as_new);
        EXPECT_NE(bits(sample.raw_logprobs),
                  bits(before.at({key.first - count, key.second}).raw_logprobs));
      }
    }
  }
}

TEST(Fp8Sampling, AnAdapterIsAddedToTheCodesOfItsBase) {
  for (const at::Device device : fp8_devices()) {
    const auto base = std::make_shared<const Parameters>(fp8_weights(Family::qwen3, 3));
    Parameters adapter(base, {.rank = 8,
                              .alpha = 16.0,
                              .targets = {kLoraTargets.begin(), kLoraTargets.end()},
                              .base_path = ""});
    const std::vector<Request> requests = requests_of(8);
    EngineOptions options = on(device, true);
    options.frozen = FrozenWeights::in_place;
    // Without numbers of its own it adds nothing.
    const Results alone = run_all(*base, on(device, true), requests);
    for (const auto& [key, sample] : run_all(adapter, options, requests)) {
      expect_same(sample, alone.at(key));
    }
    Rng rng(4);
    for (float& value : adapter.flat()) value = static_cast<float>(0.1 * rng.normal());
    const Results with = run_all(adapter, options, requests);
    EXPECT_NE(bits(with.at({0, 0}).raw_logprobs), bits(alone.at({0, 0}).raw_logprobs));
  }
}

TEST(Fp8Sampling, RefusesSizesThatAreNoMultiplesOf16) {
  ModelConfig config = fp8_config(Family::qwen3);
  config.intermediate_size = 40;
  const Parameters weights = small_parameters(config, 1);
  const std::string message = refusal([&] { Engine(weights, 0, on(at::kCPU, true)); });
  for (const char* word : {"fp8", "intermediate_size is 40", "16", "bf16"}) {
    EXPECT_NE(message.find(word), std::string::npos) << message;
  }
}

}  // namespace
}  // namespace leeway
