// The engine on a torch device against the native one: the same requests give the same tokens
// wherever rounding does not decide, and the same logprobs up to rounding. Runs on the CPU, and on
// CUDA if available.

#include "torch/torch_sampling.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "engine/test_support.h"

namespace leeway {
namespace {

using namespace testing;

std::vector<torch::Device> devices() {
  std::vector<torch::Device> list{at::kCPU};
#ifdef LEEWAY_CUDA
  if (at::hasCUDA()) list.emplace_back(at::kCUDA);
#endif
  return list;
}

EngineOptions on_torch(torch::Device device, EngineOptions options,
                       at::ScalarType compute = at::kFloat, TorchSamplingOptions own = {}) {
  options.backend = make_torch_sampling(device, compute, own);
  return options;
}

struct Agreement {
  int64_t tokens = 0, same = 0;  // up to and with the first that differs
};

// Samples must agree up to a token that differs; up to there logprobs are close.
Agreement compare(const Results& got, const Results& expected, float tolerance) {
  Agreement agreement;
  EXPECT_EQ(got.size(), expected.size());
  for (const auto& [key, sample] : expected) {
    const auto found = got.find(key);
    if (found == got.end()) {
      ADD_FAILURE() << "no sample " << key.first << " " << key.second;
      continue;
    }
    const SampledSequence& own = found->second;
    for (size_t i = 0; i < sample.ids.size(); ++i) {
      ++agreement.tokens;
      if (i >= own.ids.size() || own.ids[i] != sample.ids[i]) break;
      ++agreement.same;
      EXPECT_NEAR(own.raw_logprobs[i], sample.raw_logprobs[i], tolerance);
      EXPECT_NEAR(own.processed_logprobs[i], sample.processed_logprobs[i], tolerance);
      EXPECT_EQ(own.versions[i], sample.versions[i]);
    }
    if (own.ids == sample.ids) {
      EXPECT_EQ(own.finish, sample.finish);
    }
  }
  return agreement;
}

std::vector<Request> greedy_requests() {
  std::vector<Request> requests;
  uint64_t seed = 100;
  for (const int64_t prompt : {1, 5, 15, 16, 17, 33, 40}) {
    requests.push_back(make_request(prompt, 12, 1 + prompt % 3, ++seed));
    requests.back().sampling.temperature = 0.0f;
  }
  return requests;
}

// ---------------------------------------------------------------------------------------------
// Tokens

TEST(TorchSampling, GivesTheNativeEnginesMostLikelyTokens) {
  for (const torch::Device device : devices()) {
    for (const Family family : kFamilies) {
      for (const bool tied : {false, true}) {
        for (const bool bias : {false, true}) {
          ModelConfig config = tiny(family);
          config.tie_word_embeddings = tied;
          config.qkv_bias = config.qkv_bias || bias;
          config.output_bias = family != Family::qwen2 && bias;
          Parameters weights = small_parameters(config, 4);
          roughen(weights, 4);
          const std::vector<Request> requests = greedy_requests();
          const Results native = run_all(weights, options_of(64), requests);
          for (const int64_t rows : {3, 64}) {
            SCOPED_TRACE(fmt::format("{} {} tied {} bias {} rows {}", device.str(), name_of(family),
                                     tied, bias, rows));
            const Results results = run_all(weights, on_torch(device, options_of(rows)), requests);
            const Agreement agreement = compare(results, native, 1e-4f);
            EXPECT_EQ(agreement.same, agreement.tokens);
            ASSERT_FALSE(HasFailure());
          }
        }
      }
    }
  }
}

TEST(TorchSampling, TakesHeadsOfManyShapes) {
  for (const torch::Device device : devices()) {
    for (const auto& [heads, kv_heads, head_dim] : std::vector<std::array<int64_t, 3>>{
             {1, 1, 8}, {6, 2, 16}, {7, 1, 64}, {4, 2, 80}, {5, 1, 128}, {2, 2, 256}}) {
      SCOPED_TRACE(fmt::format("{} {} {} {}", device.str(), heads, kv_heads, head_dim));
      ModelConfig config = tiny(Family::qwen3);
      config.num_attention_heads = heads;
      config.num_key_value_heads = kv_heads;
      config.head_dim = head_dim;
      Parameters weights = small_parameters(config, 4);
      roughen(weights, 5);
      const std::vector<Request> requests = greedy_requests();
      const Agreement agreement =
          compare(run_all(weights, on_torch(device, options_of(40)), requests),
                  run_all(weights, options_of(40), requests), 2e-4f);
      EXPECT_EQ(agreement.same, agreement.tokens);
    }
  }
}

TEST(TorchSampling, DrawsTheNativeEnginesTokensForASeed) {
  for (const torch::Device device : devices()) {
    for (const Family family : kFamilies) {
      SCOPED_TRACE(fmt::format("{} {}", device.str(), name_of(family)));
      const Parameters weights = tiny_weights(family, 3);
      std::vector<Request> requests;
      for (const float temperature : {1.0f, 0.7f, 1.5f}) {
        requests.push_back(make_request(9, 20, 6, 40 + requests.size()));
        requests.back().sampling.temperature = temperature;
      }
      const Agreement agreement =
          compare(run_all(weights, on_torch(device, options_of(32)), requests),
                  run_all(weights, options_of(32), requests), 1e-4f);
      EXPECT_GE(agreement.same, agreement.tokens - 5) << "of " << agreement.tokens;
    }
  }
}

TEST(TorchSampling, FiltersAsTheNativeEngineDoes) {
  for (const torch::Device device : devices()) {
    const Parameters weights = tiny_weights(Family::qwen3, 3);
    const std::vector<Request> requests = assorted(16, 5);
    const Agreement agreement =
        compare(run_all(weights, on_torch(device, options_of(11, 2)), requests),
                run_all(weights, options_of(11, 2), requests), 2e-4f);
    EXPECT_GE(agreement.same, agreement.tokens - 5) << "of " << agreement.tokens;
  }
}

TEST(TorchSampling, RepeatsARun) {
  for (const torch::Device device : devices()) {
    const Parameters weights = tiny_weights(Family::llama, 3);
    const EngineOptions options = on_torch(device, options_of(20));
    const Results once = run_all(weights, options, assorted(8, 9));
    const Results again = run_all(weights, options, assorted(8, 9));
    ASSERT_EQ(once.size(), again.size());
    for (const auto& [key, result] : once) expect_same(again.at(key), result);
  }
}

TEST(TorchSampling, FillingUpPassesChangesNoToken) {
  for (const torch::Device device : devices()) {
    const Parameters weights = tiny_weights(Family::qwen2, 3);
    const std::vector<Request> requests = assorted(12, 21);
    const Results filled = run_all(weights, on_torch(device, options_of(40)), requests);
    const Results plain =
        run_all(weights, on_torch(device, options_of(40), at::kFloat, {.graphs = false}), requests);
    const Agreement agreement = compare(filled, plain, 1e-4f);
    EXPECT_GE(agreement.same, agreement.tokens - 5) << "of " << agreement.tokens;
  }
}

TEST(TorchSampling, FillsTheModelToItsLastPosition) {
  for (const torch::Device device : devices()) {
    const Parameters weights = tiny_weights(Family::llama, 6);
    for (const int64_t tokens : {1, 17}) {
      std::vector<Request> requests{make_request(kPositions - tokens, tokens, 2, 3)};
      requests[0].sampling.temperature = 0.0f;
      const Agreement agreement =
          compare(run_all(weights, on_torch(device, options_of(40)), requests),
                  run_all(weights, options_of(40), requests), 1e-4f);
      EXPECT_EQ(agreement.same, agreement.tokens);
    }
  }
}

TEST(TorchSampling, Bf16IsNearFloat32) {
  for (const torch::Device device : devices()) {
    const Parameters weights = tiny_weights(Family::qwen3, 3);
    std::vector<Request> requests{make_request(20, 1, 8, 3), make_request(5, 1, 8, 4)};
    const Results native = run_all(weights, options_of(40), requests);
    const Results results =
        run_all(weights, on_torch(device, options_of(40), at::kBFloat16), requests);
    const Agreement agreement = compare(results, native, 0.05f);
    EXPECT_GE(agreement.same, agreement.tokens / 2);
  }
}

// ---------------------------------------------------------------------------------------------
// The distribution

TEST(TorchSampling, DrawsFromTheModelsDistribution) {
  for (const torch::Device device : devices()) {
    const Parameters weights = tiny_weights(Family::qwen3, 3);
    WholePass whole(weights, Precision::float32);
    Request request = make_request(6, 1, 250, 8);
    const float temperature = 0.8f;
    request.sampling.temperature = temperature;
    const std::vector<float> all = whole.logits(request.prompt);
    const int64_t vocabulary = weights.config().vocab_size;
    const float* row = &all[all.size() - static_cast<size_t>(vocabulary)];
    std::vector<int64_t> counts(static_cast<size_t>(vocabulary));
    int64_t draws = 0;
    Engine engine(weights, 0, on_torch(device, options_of(64)));
    for (uint64_t seed = 0; seed < 16; ++seed) {
      request.seed = seed;
      engine.submit(request);
    }
    for (const auto& [key, result] : run_to_the_end(engine)) {
      ++counts[static_cast<size_t>(result.ids.at(0))];
      ++draws;
    }
    ASSERT_EQ(draws, 16 * 250);
    for (int64_t id = 0; id < vocabulary; ++id) {
      const double p =
          std::exp(row_softmax(row, vocabulary, 1.0f / temperature, id, false).logprob);
      const double expected = p * static_cast<double>(draws);
      EXPECT_NEAR(static_cast<double>(counts[static_cast<size_t>(id)]), expected,
                  5.0 * std::sqrt(expected * (1.0 - p)) + 1.0)
          << id;
    }
  }
}

// ---------------------------------------------------------------------------------------------
// Weights

TEST(TorchSampling, WeightsWithoutADistributionFailAsInTheNativeEngine) {
  for (const torch::Device device : devices()) {
    for (const float value :
         {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
      Parameters weights = tiny_weights(Family::qwen3, 2);
      for (float& weight : weights.of(weights.table().size() - 1)) weight = value;
      const auto message = [&](const EngineOptions& options) {
        Engine engine(weights, 3, options);
        engine.submit(make_request(5, 4, 2, 1));
        const std::string text = refusal([&] { engine.step(); });
        EXPECT_TRUE(engine.idle());
        for (const SampledSequence& sample : engine.take_finished()) {
          EXPECT_EQ(sample.finish, Finish::cancelled);
        }
        return text;
      };
      const std::string native = message(options_of(32));
      EXPECT_NE(native.find("weights of version 3"), std::string::npos) << native;
      EXPECT_EQ(message(on_torch(device, options_of(32))), native);
    }
  }
}

TEST(TorchSampling, GoesOnWithOthersWhereOneFails) {
  for (const torch::Device device : devices()) {
    // One token's embedding is broken: only the request that contains it fails.
    Parameters weights = tiny_weights(Family::llama, 2);
    float* embedding = weights.find("model.embed_tokens.weight");
    embedding[13 * weights.config().hidden_size] = std::numeric_limits<float>::quiet_NaN();
    Request good = make_request(4, 6, 2, 1), bad = good;
    good.prompt = {1, 2, 3}, bad.prompt = {4, 13, 5};
    good.sampling.temperature = 0.0f;
    good.stop_ids = {13};
    const auto tokens = [&](const EngineOptions& options) {
      Engine engine(weights, 0, options);
      engine.submit(bad);
      engine.submit(good);
      EXPECT_NE(refusal([&] { engine.step(); }).find("the request is removed"), std::string::npos);
      return run_to_the_end(engine);
    };
    const Results got = tokens(on_torch(device, options_of(32)));
    const Agreement agreement = compare(got, tokens(options_of(32)), 1e-4f);
    EXPECT_EQ(agreement.same, agreement.tokens);
  }
}

TEST(TorchSampling, SwapsWeightsBetweenSteps) {
  for (const torch::Device device : devices()) {
    for (const KvAfterSwap after : {KvAfterSwap::keep, KvAfterSwap::recompute}) {
      const Parameters first = tiny_weights(Family::qwen2, 2);
      const auto second = std::make_shared<const Parameters>(tiny_weights(Family::qwen2, 7));
      const auto tokens = [&](EngineOptions options) {
        options.kv_after_swap = after;
        Engine engine(first, 1, options);
        for (Request& request : greedy_requests()) engine.submit(request);
        for (int i = 0; i < 6; ++i) engine.step();
        engine.update_weights(std::make_shared<const PolicySnapshot>(second, 2));
        return run_to_the_end(engine);
      };
      const Agreement agreement =
          compare(tokens(on_torch(device, options_of(64))), tokens(options_of(64)), 1e-4f);
      EXPECT_EQ(agreement.same, agreement.tokens);
    }
  }
}

// ---------------------------------------------------------------------------------------------
// Memory and refusals

TEST(TorchSampling, CountsBlocksInItsOwnType) {
  const Parameters weights = tiny_weights(Family::qwen3, 2);
  EngineOptions options = options_of(32);
  options.kv_bytes = bytes_of(weights, 5);
  EXPECT_EQ(Engine(weights, 0, on_torch(at::kCPU, options)).blocks(), 5);
  EXPECT_EQ(Engine(weights, 0, on_torch(at::kCPU, options, at::kBFloat16)).blocks(), 10);
  options.kv_bytes = 100;
  EXPECT_NE(refusal([&] { Engine(weights, 0, on_torch(at::kCPU, options)); }).find("kv_bytes"),
            std::string::npos);
}

TEST(TorchSampling, RefusesWhatItCannotDo) {
  const Parameters weights = tiny_weights(Family::qwen3, 2);
  const auto message = [&](torch::Device device, at::ScalarType compute) {
    return refusal([&] { Engine(weights, 0, on_torch(device, options_of(32), compute)); });
  };
  EXPECT_NE(message(at::kCPU, at::kHalf).find("float32 or bfloat16"), std::string::npos);
#ifndef LEEWAY_CUDA
  EXPECT_NE(message(at::kCUDA, at::kFloat).find("no CUDA"), std::string::npos);
#endif
}

}  // namespace
}  // namespace leeway
