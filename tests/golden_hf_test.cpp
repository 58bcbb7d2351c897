// The decoder against Hugging Face transformers: logits, logprobs, the gradient of every parameter
// and greedy tokens of small models whose weights and results are in tests/data/hf.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/cpu/policy_head.h"
#include "engine/engine.h"
#include "model/cpu_decoder.h"
#include "model/safetensors.h"

namespace leeway {
namespace {

constexpr int64_t kSequences = 2, kLength = 96;

std::string folder_of(const std::string& name) {
  return std::string(LEEWAY_SOURCE_DIR) + "/tests/data/hf/" + name;
}

std::vector<int32_t> ids_of(const SafetensorsFile& file, const std::string& name) {
  const StoredTensor* tensor = file.find(name);
  if (tensor == nullptr || tensor->dtype != DType::i64) throw std::runtime_error(name);
  std::vector<int64_t> wide(static_cast<size_t>(tensor->size()));
  const std::string bytes = tensor->bytes();
  std::memcpy(wide.data(), bytes.data(), bytes.size());
  return {wide.begin(), wide.end()};
}

std::vector<float> floats_of(const SafetensorsFile& file, const std::string& name) {
  const StoredTensor* tensor = file.find(name);
  if (tensor == nullptr) throw std::runtime_error(name);
  std::vector<float> values(static_cast<size_t>(tensor->size()));
  copy_as_float(*tensor, file.path(), values);
  return values;
}

class GoldenHf : public testing::TestWithParam<std::string> {
 protected:
  GoldenHf()
      : parameters_(load_parameters(folder_of(GetParam()))),
        golden_(folder_of(GetParam()) + "/golden.safetensors"),
        tokens_(ids_of(golden_, "input_ids")) {}

  PackedTokens batch() const { return {tokens_, cu_seqlens_}; }
  int64_t hidden_size() const { return parameters_.config().hidden_size; }
  int64_t vocabulary() const { return parameters_.config().vocab_size; }

  // Row t predicts token t+1 of its sequence; a sequence's last row predicts nothing.
  HeadProblem head_problem(const std::vector<float>& hidden) {
    targets_.assign(tokens_.begin() + 1, tokens_.end());
    targets_.push_back(0);
    rows_.clear();
    for (int64_t t = 0; t < kSequences * kLength; ++t) {
      if (t % kLength != kLength - 1) rows_.push_back(t);
    }
    HeadProblem problem;
    problem.tokens = kSequences * kLength;
    problem.hidden_size = hidden_size(), problem.vocabulary = vocabulary();
    problem.hidden = rows_of(hidden.data(), hidden_size());
    problem.weight = rows_of(network_of(parameters_).head, hidden_size());
    problem.targets = targets_, problem.rows = rows_, problem.all_rows = false;
    return problem;
  }

  ThreadPool pool_{2};
  Parameters parameters_;
  SafetensorsFile golden_;
  std::vector<int32_t> tokens_;
  std::vector<int64_t> cu_seqlens_{0, kLength, 2 * kLength};
  std::vector<int64_t> targets_, rows_;
};

TEST_P(GoldenHf, LogitsAgree) {
  std::vector<float> hidden(tokens_.size() * static_cast<size_t>(hidden_size()));
  training_forward(pool_, parameters_, batch(), {}, hidden, nullptr);
  std::vector<float> logits(tokens_.size() * static_cast<size_t>(vocabulary()));
  pool_.run_team([&](Team& team) {
    gemm(team, kSequences * kLength, vocabulary(), hidden_size(),
         rows_of(hidden.data(), hidden_size()),
         columns_of(network_of(parameters_).head, hidden_size()), logits.data(), vocabulary());
  });
  const std::vector<float> expected = floats_of(golden_, "logits");
  ASSERT_EQ(logits.size(), expected.size());
  double worst = 0.0;
  for (size_t i = 0; i < logits.size(); ++i) {
    worst = std::max(worst, static_cast<double>(std::abs(logits[i] - expected[i])));
  }
  RecordProperty("largest_difference", std::to_string(worst));
  EXPECT_LT(worst, 1e-4);
}

TEST_P(GoldenHf, LogprobsAndEveryGradientAgree) {
  for (bool recompute : {false, true}) {
    std::vector<float> hidden(tokens_.size() * static_cast<size_t>(hidden_size()));
    Activations activations;
    training_forward(pool_, parameters_, batch(), {.recompute_activations = recompute}, hidden,
                     &activations);
    const HeadProblem problem = head_problem(hidden);
    std::vector<float> logprobs(tokens_.size());
    head_logprobs(pool_, problem, logprobs, {});
    const std::vector<float> expected = floats_of(golden_, "logprobs");
    ASSERT_EQ(expected.size(), rows_.size());
    std::vector<float> g(tokens_.size());
    for (size_t i = 0; i < rows_.size(); ++i) {
      const auto row = static_cast<size_t>(rows_[i]);
      EXPECT_NEAR(logprobs[row], expected[i], 1e-4);
      g[row] = -1.0f + 2.0f * static_cast<float>(i) / static_cast<float>(rows_.size() - 1);
    }

    Parameters gradients(parameters_.config());
    const auto network = network_of(gradients);
    std::vector<float> d_hidden(hidden.size());
    head_backward(pool_, problem, g, {}, d_hidden,
                  {network.head, static_cast<size_t>(vocabulary() * hidden_size())});
    training_backward(pool_, parameters_, batch(), d_hidden, activations, gradients);
    for (size_t p = 0; p < gradients.table().size(); ++p) {
      const std::string& name = gradients.table()[p].name;
      const std::vector<float> wanted = floats_of(golden_, "grad." + name);
      const std::span<const float> got = std::as_const(gradients).of(p);
      ASSERT_EQ(wanted.size(), got.size());
      double difference = 0.0, norm = 0.0, largest = 0.0;
      for (size_t i = 0; i < wanted.size(); ++i) {
        difference += std::pow(static_cast<double>(got[i]) - static_cast<double>(wanted[i]), 2);
        norm += std::pow(static_cast<double>(wanted[i]), 2);
        largest = std::max(largest, std::abs(static_cast<double>(wanted[i])));
      }
      EXPECT_LT(std::sqrt(difference), 1e-3 * std::sqrt(norm)) << name;
      for (size_t i = 0; i < wanted.size(); ++i) {
        EXPECT_NEAR(got[i], wanted[i], 1e-3 * std::abs(wanted[i]) + 1e-4 * largest)
            << name << " entry " << i;
      }
    }
  }
}

TEST_P(GoldenHf, GreedyTokensAreEqual) {
  const std::vector<int32_t> greedy = ids_of(golden_, "greedy");
  Engine engine(parameters_, 0, {.threads = 2, .kv_bytes = 1 << 22});
  for (size_t s = 0; s < kSequences; ++s) {
    const auto* first = greedy.data() + s * 64;
    engine.submit(
        {.prompt = {first, first + 16}, .max_new_tokens = 48, .sampling = {.temperature = 0.0f}});
  }
  size_t seen = 0;
  while (!engine.idle()) {
    engine.step();
    for (const SampledSequence& completion : engine.take_finished()) {
      const auto* expected = greedy.data() + completion.request * 64 + 16;
      EXPECT_EQ(completion.ids, std::vector<int32_t>(expected, expected + 48));
      ++seen;
    }
  }
  EXPECT_EQ(seen, static_cast<size_t>(kSequences));
}

INSTANTIATE_TEST_SUITE_P(Models, GoldenHf, testing::Values("qwen3-tied", "llama3-rope"),
                         [](const auto& model) {
                           std::string name = model.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

}  // namespace
}  // namespace leeway
