// Small models, requests of all kinds, and a loop that samples without a KV cache.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <map>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "kernels/rows.h"
#include "leeway/error.h"
#include "model/cpu_decoder.h"
#include "model/test_files.h"

namespace leeway::testing {

inline constexpr int64_t kPositions = 96;

inline ModelConfig tiny(Family family) {
  ModelConfig config = small_config(family, family == Family::qwen3);
  config.hidden_size = 32;
  config.max_position_embeddings = kPositions;
  if (family == Family::llama) config.llama3_rope = Llama3Rope{8.0, 1.0, 4.0, 32};
  return config;
}

inline Parameters tiny_weights(Family family, uint64_t seed) {
  Parameters weights = small_parameters(tiny(family), seed);
  roughen(weights, seed);
  return weights;
}

inline EngineOptions options_of(int64_t rows, int threads = 1) {
  EngineOptions options;
  options.max_rows_per_step = rows;
  options.threads = threads;
  return options;
}

// Memory for this many blocks.
inline int64_t bytes_of(const Parameters& weights, int64_t blocks) {
  return blocks * static_cast<int64_t>(KvStore::block_bytes(weights.config()));
}

inline Request make_request(int64_t prompt, int64_t tokens, int64_t samples, uint64_t seed) {
  Request request;
  Rng rng(seed);
  for (int64_t i = 0; i < prompt; ++i)
    request.prompt.push_back(static_cast<int32_t>(rng.below(50)));
  request.max_new_tokens = tokens;
  request.samples = samples;
  request.seed = seed;
  return request;
}

// Requests of all kinds, determined by the seed.
inline std::vector<Request> assorted(int count, uint64_t seed) {
  const std::vector<SamplingSettings> settings{{},
                                               {.temperature = 0.0f},
                                               {.temperature = 0.7f, .top_k = 8},
                                               {.top_p = 0.8f, .min_p = 0.02f}};
  Rng rng(seed);
  std::vector<Request> requests;
  for (int i = 0; i < count; ++i) {
    requests.push_back(make_request(1 + static_cast<int64_t>(rng.below(36)),
                                    1 + static_cast<int64_t>(rng.below(20)),
                                    1 + static_cast<int64_t>(rng.below(3)), rng.next()));
    requests.back().sampling = settings[rng.below(settings.size())];
    if (rng.below(3) == 0) requests.back().stop_ids = {static_cast<int32_t>(rng.below(50)), 7};
  }
  return requests;
}

inline std::vector<uint32_t> bits(const std::vector<float>& values) {
  std::vector<uint32_t> result;
  for (float v : values) result.push_back(std::bit_cast<uint32_t>(v));
  return result;
}

inline void expect_same(const SampledSequence& got, const SampledSequence& expected) {
  EXPECT_EQ(got.finish, expected.finish);
  EXPECT_EQ(got.ids, expected.ids);
  EXPECT_EQ(bits(got.raw_logprobs), bits(expected.raw_logprobs));
  EXPECT_EQ(bits(got.processed_logprobs), bits(expected.processed_logprobs));
}

using Results = std::map<std::pair<int64_t, int64_t>, SampledSequence>;

// Everything that ended since the last call, by request and sample; each must be new.
inline void collect(Engine& engine, Results& results) {
  for (SampledSequence& result : engine.take_finished()) {
    const std::pair key(result.request, result.sample);
    ASSERT_TRUE(results.emplace(key, std::move(result)).second) << "a sample ended twice";
  }
}

inline Results run_to_the_end(Engine& engine) {
  Results results;
  for (int steps = 0; !engine.idle(); ++steps) {
    if (steps > 10000) {
      ADD_FAILURE() << "the engine does not come to an end";
      return results;
    }
    const StepReport report = engine.step();
    EXPECT_GE(report.free_blocks, 0);
    EXPECT_LE(report.free_blocks, engine.blocks());
    collect(engine, results);
  }
  EXPECT_EQ(engine.step().free_blocks, engine.blocks());
  return results;
}

inline Results run_all(const Parameters& weights, const EngineOptions& options,
                       const std::vector<Request>& requests) {
  Engine engine(weights, 0, options);
  for (const Request& request : requests) engine.submit(request);
  return run_to_the_end(engine);
}

// Logits of all rows of one sequence, computed in one pass.
class WholePass {
 public:
  WholePass(const Parameters& weights, Precision precision)
      : vocabulary_(weights.config().vocab_size),
        pool_(1),
        kv_(weights.config(), kPositions / kBlockKeys),
        decoder_(weights.config(), precision),
        blocks_(static_cast<size_t>(kv_.blocks())) {
    std::iota(blocks_.begin(), blocks_.end(), 0);
    decoder_.load(pool_, weights);
  }

  std::vector<float> logits(const std::vector<int32_t>& tokens) {
    std::vector<int32_t> rows(tokens.size());
    std::iota(rows.begin(), rows.end(), 0);
    std::vector<float> result(tokens.size() * static_cast<size_t>(vocabulary_));
    const SequenceRows sequence{0, static_cast<int64_t>(tokens.size()), 0, blocks_.data()};
    decoder_.run(pool_, tokens, {&sequence, 1}, kv_, rows, result.data());
    return result;
  }

  // What a trainer computes for the tokens of a result, from number `first` on.
  std::vector<float> logprobs(const Request& request, const SampledSequence& result, size_t first) {
    std::vector<int32_t> tokens = request.prompt;
    tokens.insert(tokens.end(), result.ids.begin(), result.ids.end());
    const std::vector<float> all = logits(tokens);
    std::vector<float> values;
    for (size_t i = first; i < result.ids.size(); ++i) {
      const float* row = &all[(request.prompt.size() + i - 1) * static_cast<size_t>(vocabulary_)];
      values.push_back(row_softmax(row, vocabulary_, 1.0f, result.ids[i], false).logprob);
    }
    return values;
  }

  SampledSequence sample(const Request& request, int64_t number) {
    SampledSequence result;
    TokenSampler sampler;
    Rng rng = sample_stream(request.seed, number);
    std::vector<int32_t> tokens = request.prompt;
    result.finish = Finish::length;
    while (static_cast<int64_t>(result.ids.size()) < request.max_new_tokens) {
      const std::vector<float> all = logits(tokens);
      const std::span<const float> row =
          std::span<const float>(all).last(static_cast<size_t>(vocabulary_));
      const SampledToken token = sampler.sample(row, request.sampling, rng);
      tokens.push_back(token.id);
      result.ids.push_back(token.id);
      result.raw_logprobs.push_back(token.raw_logprob);
      result.processed_logprobs.push_back(token.processed_logprob);
      if (std::count(request.stop_ids.begin(), request.stop_ids.end(), token.id) == 0) continue;
      result.finish = Finish::stop;
      break;
    }
    return result;
  }

 private:
  int64_t vocabulary_;
  ThreadPool pool_;
  KvStore kv_;
  SamplingDecoder decoder_;
  std::vector<int32_t> blocks_;
};

inline constexpr Family kFamilies[] = {Family::qwen3, Family::qwen2, Family::llama};
inline constexpr Precision kPrecisions[] = {Precision::float32, Precision::bf16, Precision::int8};

template <class Function>
std::string refusal(Function&& function) {
  try {
    function();
  } catch (const Error& error) {
    return error.what();
  }
  return "accepted";
}

}  // namespace leeway::testing
