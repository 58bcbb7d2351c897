// Trainer = prefill = decode. With `exact` numerics, the logprob recorded when a token was sampled
// equals bit for bit what a prefill and the packed training forward compute, whatever the batch,
// the chunks and the number of threads. With `fast`, the difference is measured and printed.

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <iostream>
#include <numeric>

#include "base/rng.h"
#include "core/cpu/policy_head.h"
#include "engine/engine.h"
#include "leeway/error.h"
#include "model/cpu_decoder.h"
#include "model/test_files.h"

namespace leeway {
namespace {

ModelConfig config_of(Family family, bool tied) {
  ModelConfig config = testing::small_config(family, tied);
  config.vocab_size = 203;  // odd sizes, to cover every kind of remainder
  config.hidden_size = 72;
  config.intermediate_size = 600;  // long enough for a BLAS to split its sums
  config.num_hidden_layers = 3;
  config.num_attention_heads = 6;
  config.head_dim = 20;
  config.max_position_embeddings = 512;
  if (family == Family::llama) config.llama3_rope = Llama3Rope{8.0, 1.0, 4.0, 64};
  return config;
}

Parameters model_of(const ModelConfig& config, uint64_t seed) {
  Parameters parameters = testing::small_parameters(config, seed);
  testing::roughen(parameters, seed + 1);
  return parameters;
}

struct Case {
  Family family;
  bool tied;
  std::string name;
  std::vector<std::string> lora_targets = {};  // of an adapter over the model; none: there is none
};

// An adapter that has learned something: B is not zero.
Parameters policy_of(const Case& kind) {
  Parameters model = model_of(config_of(kind.family, kind.tied), 3);
  if (kind.lora_targets.empty()) return model;
  Parameters adapter(std::make_shared<const Parameters>(std::move(model)),
                     {.rank = 5, .alpha = 7.0, .targets = kind.lora_targets, .base_path = ""});
  Rng rng(11);
  for (float& value : adapter.flat()) value = static_cast<float>(0.2 * rng.normal());
  return adapter;
}

// What the engine sampled, as whole sequences.
struct Sampled {
  std::vector<int32_t> tokens;  // prompt and completion
  size_t prompt = 0;
  std::vector<float> logprobs;  // of the completion, as recorded
};

std::vector<Sampled> sample(const Parameters& parameters, const EngineOptions& options) {
  Engine engine(parameters, 0, options);
  Rng rng(7);
  std::vector<Request> requests;
  for (int i = 0; i < 14; ++i) {
    Request request;
    request.prompt.resize(1 + rng.below(60));
    for (int32_t& id : request.prompt) {
      id = static_cast<int32_t>(rng.below(static_cast<uint64_t>(parameters.config().vocab_size)));
    }
    request.samples = 1 + static_cast<int64_t>(rng.below(3));
    request.max_new_tokens = 1 + static_cast<int64_t>(rng.below(50));
    request.seed = rng.next();
    requests.push_back(request);
  }
  std::vector<Sampled> sampled;
  size_t next = 0;
  while (next < requests.size() || !engine.idle()) {
    // Requests join while others are running.
    if (next < requests.size()) engine.submit(requests[next++]);
    engine.step();
    for (const SampledSequence& completion : engine.take_finished()) {
      Sampled& entry = sampled.emplace_back();
      entry.tokens = requests[static_cast<size_t>(completion.request)].prompt;
      entry.prompt = entry.tokens.size();
      entry.tokens.insert(entry.tokens.end(), completion.ids.begin(), completion.ids.end());
      entry.logprobs = completion.raw_logprobs;
    }
  }
  return sampled;
}

// The trainer's logprobs of sequences packed in the given order, [sequence][token t]: of token t+1
// given tokens 0 .. t.
std::vector<std::vector<float>> train_logprobs(const Parameters& parameters,
                                               const std::vector<Sampled>& sequences,
                                               const std::vector<size_t>& order, int threads,
                                               int64_t chunk_bytes, Numerics numerics) {
  const ModelConfig& config = parameters.config();
  std::vector<int32_t> tokens;
  std::vector<int64_t> cu_seqlens{0}, targets, rows;
  for (size_t s : order) {
    const auto& ids = sequences[s].tokens;
    for (size_t t = 0; t + 1 < ids.size(); ++t) {
      rows.push_back(static_cast<int64_t>(targets.size()));
      targets.push_back(ids[t + 1]);
    }
    targets.push_back(0);
    tokens.insert(tokens.end(), ids.begin(), ids.end());
    cu_seqlens.push_back(static_cast<int64_t>(tokens.size()));
  }
  ThreadPool pool(threads);
  std::vector<float> hidden(tokens.size() * static_cast<size_t>(config.hidden_size));
  training_forward(pool, parameters, {tokens, cu_seqlens}, {.numerics = numerics}, hidden, nullptr);
  HeadProblem problem;
  problem.tokens = static_cast<int64_t>(tokens.size());
  problem.hidden_size = config.hidden_size, problem.vocabulary = config.vocab_size;
  problem.hidden = rows_of(hidden.data(), config.hidden_size);
  problem.weight = rows_of(network_of(parameters).head, config.hidden_size);
  problem.targets = targets, problem.rows = rows, problem.all_rows = false;
  problem.chunk_bytes = chunk_bytes;
  std::vector<float> flat(tokens.size());
  head_logprobs(pool, problem, flat, {});
  std::vector<std::vector<float>> result(sequences.size());
  for (size_t i = 0; i < order.size(); ++i) {
    result[order[i]].assign(flat.begin() + cu_seqlens[i], flat.begin() + cu_seqlens[i + 1] - 1);
  }
  return result;
}

// The same by a prefill of one sequence in chunks.
std::vector<float> prefill_logprobs(const Parameters& parameters, const Sampled& sequence,
                                    Precision precision, int64_t chunk, int threads) {
  const ModelConfig& config = parameters.config();
  ThreadPool pool(threads);
  SamplingDecoder decoder(config, precision);
  decoder.load(pool, parameters);
  const auto length = static_cast<int64_t>(sequence.tokens.size());
  KvStore kv(config, (length + kBlockKeys - 1) / kBlockKeys);
  std::vector<int32_t> blocks(static_cast<size_t>(kv.blocks()));
  std::iota(blocks.rbegin(), blocks.rend(), 0);  // in reverse memory order
  std::vector<float> logprobs;
  for (int64_t first = 0; first < length; first += chunk) {
    const int64_t rows = std::min(chunk, length - first);
    std::vector<int32_t> logit_rows(static_cast<size_t>(rows));
    std::iota(logit_rows.begin(), logit_rows.end(), 0);
    std::vector<float> logits(static_cast<size_t>(rows * config.vocab_size));
    const SequenceRows part{0, rows, first, blocks.data()};
    decoder.run(
        pool,
        std::span(sequence.tokens).subspan(static_cast<size_t>(first), static_cast<size_t>(rows)),
        {&part, 1}, kv, logit_rows, logits.data());
    for (int64_t i = 0; i < rows && first + i + 1 < length; ++i) {
      logprobs.push_back(row_softmax(logits.data() + i * config.vocab_size, config.vocab_size, 1.0f,
                                     sequence.tokens[static_cast<size_t>(first + i + 1)], false)
                             .logprob);
    }
  }
  return logprobs;
}

bool same_bits(float a, float b) {
  return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b);
}

class Exactness : public ::testing::TestWithParam<Case> {};

TEST_P(Exactness, TrainerEqualsPrefillEqualsDecodeBitForBit) {
  const Parameters parameters = policy_of(GetParam());
  size_t compared = 0;
  for (const auto& [threads, rows_per_step] :
       std::vector<std::pair<int, int64_t>>{{1, 512}, {2, 7}, {3, 64}}) {
    // The prefill packs what lies below an adapter.
    const auto sampled = sample(parameters, {.threads = threads,
                                             .kv_bytes = 2 << 20,
                                             .max_rows_per_step = rows_per_step,
                                             .frozen = FrozenWeights::in_place});
    std::vector<size_t> order(sampled.size());
    std::iota(order.begin(), order.end(), size_t{0});
    for (int shuffle = 0; shuffle < 3; ++shuffle) {
      const auto trained =
          train_logprobs(parameters, sampled, order, 1 + shuffle,
                         shuffle == 0 ? 1 : int64_t{1} << (12 + 4 * shuffle), Numerics::exact);
      for (size_t s = 0; s < sampled.size(); ++s) {
        // One token at a time is slow and the sequences are alike, so not all of them are checked.
        const auto chunk = std::vector<int64_t>{1000, 1, 13}[static_cast<size_t>(shuffle)];
        if (chunk > 1 || s < 3) {
          const auto prefilled =
              prefill_logprobs(parameters, sampled[s], Precision::float32, chunk, 1 + shuffle % 2);
          ASSERT_EQ(prefilled.size(), trained[s].size());
          for (size_t t = 0; t < trained[s].size(); ++t) {
            ASSERT_TRUE(same_bits(trained[s][t], prefilled[t]))
                << "sequence " << s << " token " << t;
          }
        }
        for (size_t i = 0; i < sampled[s].logprobs.size(); ++i, ++compared) {
          ASSERT_TRUE(same_bits(sampled[s].logprobs[i], trained[s][sampled[s].prompt + i - 1]))
              << "sequence " << s << " sampled token " << i << ": recorded "
              << sampled[s].logprobs[i] << ", trainer " << trained[s][sampled[s].prompt + i - 1];
        }
      }
      std::rotate(order.begin(), order.begin() + 5, order.end());
    }
  }
  std::cout << "  " << compared << " sampled tokens compared, all equal\n";
  EXPECT_GT(compared, 1000u);
}

TEST_P(Exactness, FastNumericsAreMeasured) {
  try {
    require_blas();
  } catch (const Error& error) {
    GTEST_SKIP() << error.what();
  }
  const Parameters parameters = policy_of(GetParam());
  const auto sampled = sample(parameters, {.threads = 2, .kv_bytes = 2 << 20});
  std::vector<size_t> order(sampled.size());
  std::iota(order.begin(), order.end(), size_t{0});
  const auto trained =
      train_logprobs(parameters, sampled, order, 2, int64_t{1} << 20, Numerics::fast);
  double largest = 0.0, sum = 0.0;
  size_t different = 0, count = 0;
  for (size_t s = 0; s < sampled.size(); ++s) {
    for (size_t i = 0; i < sampled[s].logprobs.size(); ++i, ++count) {
      const double difference =
          std::abs(static_cast<double>(sampled[s].logprobs[i]) -
                   static_cast<double>(trained[s][sampled[s].prompt + i - 1]));
      largest = std::max(largest, difference);
      sum += difference;
      different += difference != 0.0;
    }
  }
  std::cout << "  fast: " << different << " of " << count << " log-probabilities differ, mean "
            << sum / static_cast<double>(count) << ", largest " << largest << "\n";
  EXPECT_LT(largest, 1e-3);
}

INSTANTIATE_TEST_SUITE_P(
    Families, Exactness,
    ::testing::Values(
        Case{Family::qwen3, true, "qwen3_tied"}, Case{Family::qwen3, false, "qwen3_untied"},
        Case{Family::qwen2, true, "qwen2_tied"}, Case{Family::llama, false, "llama_untied"},
        Case{Family::qwen3,
             true,
             "qwen3_lora",
             {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}},
        Case{Family::qwen2, false, "qwen2_lora_on_some", {"q_proj", "v_proj", "up_proj"}}),
    [](const auto& model) { return model.param.name; });

}  // namespace
}  // namespace leeway
