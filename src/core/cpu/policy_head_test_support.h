// What the tests of the policy head share: random heads with batches that fit them, and the slow
// way to the same numbers: every logit in memory, in double.
#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <optional>
#include <vector>

#include "core/cpu/policy_head.h"
#include "core/test_support.h"

namespace leeway::testing {

inline uint16_t to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
inline float from_bf16(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

// A head that owns its numbers. With `bf16` the operands are the upper halves of `hidden` and
// `weight`, which hold no more than that.
struct Head {
  int64_t tokens, hidden_size, vocabulary;
  std::vector<float> hidden, weight;
  std::vector<uint16_t> hidden_bf16, weight_bf16;
  std::vector<int64_t> targets, rows;
  bool all_rows = true, bf16 = false;
  std::vector<float> temperature;
  int64_t chunk_bytes = int64_t{64} << 20;

  Head(uint64_t seed, int64_t n, int64_t h, int64_t v) : tokens(n), hidden_size(h), vocabulary(v) {
    Rng rng(seed);
    const double scale = 1.5 / std::sqrt(static_cast<double>(h));
    for (int64_t i = 0; i < n * h; ++i) hidden.push_back(static_cast<float>(rng.normal()));
    for (int64_t i = 0; i < v * h; ++i) weight.push_back(static_cast<float>(scale * rng.normal()));
    for (int64_t i = 0; i < n; ++i) {
      targets.push_back(static_cast<int64_t>(rng.below(static_cast<uint64_t>(v))));
    }
  }

  void round_to_bf16() {
    bf16 = true;
    for (float& value : hidden) value = from_bf16(hidden_bf16.emplace_back(to_bf16(value)));
    for (float& value : weight) value = from_bf16(weight_bf16.emplace_back(to_bf16(value)));
  }
  void temperature_per_token(uint64_t seed) {
    Rng rng(seed);
    temperature.clear();
    for (int64_t i = 0; i < tokens; ++i) {
      temperature.push_back(static_cast<float>(0.5 + rng.uniform()));
    }
  }
  // Lists the tokens of the mask, and every fifth of the others.
  void list_rows(std::span<const uint8_t> mask) {
    all_rows = false;
    rows.clear();
    for (int64_t i = 0; i < tokens; ++i) {
      if (mask[static_cast<size_t>(i)] || i % 5 == 0) rows.push_back(i);
    }
  }
  // Gives a chunk room for so many rows, in the terms of what the head says it needs.
  void rows_in_a_chunk(int64_t count) {
    HeadProblem sized = problem();
    sized.all_rows = true;
    auto bytes = [&](int64_t of_tokens, int64_t room) {
      sized.tokens = of_tokens, sized.chunk_bytes = room;
      return head_workspace_bytes(sized);
    };
    const int64_t row = bytes(2, int64_t{1} << 40) - bytes(2, 0);
    chunk_bytes = bytes(0, 0) + (count - 1) * row;
  }

  HeadProblem problem() const {
    HeadProblem out;
    out.tokens = tokens, out.hidden_size = hidden_size, out.vocabulary = vocabulary;
    out.hidden = rows_of(hidden.data(), hidden_size);
    out.weight = rows_of(weight.data(), hidden_size);
    if (bf16) {
      out.hidden = {hidden_bf16.data(), hidden_size, 1, true};
      out.weight = {weight_bf16.data(), hidden_size, 1, true};
    }
    out.targets = targets;
    out.rows = rows;
    out.all_rows = all_rows;
    out.temperature = temperature;
    out.chunk_bytes = chunk_bytes;
    return out;
  }
  std::vector<int64_t> listed() const {
    std::vector<int64_t> list = rows;
    for (int64_t i = 0; all_rows && i < tokens; ++i) list.push_back(i);
    return list;
  }
};

// log p and p of one row, and the row's entropy.
struct ReferenceRow {
  std::vector<double> log_p;
  double entropy = 0.0, inverse_temperature = 1.0;
};

inline ReferenceRow reference_row(const Head& head, int64_t token) {
  ReferenceRow row;
  if (!head.temperature.empty()) {
    row.inverse_temperature =
        1.0 / static_cast<double>(
                  head.temperature[head.temperature.size() == 1 ? 0 : static_cast<size_t>(token)]);
  }
  double largest = -kInfinity, total = 0.0;
  for (int64_t v = 0; v < head.vocabulary; ++v) {
    double z = 0.0;
    for (int64_t j = 0; j < head.hidden_size; ++j) {
      z += static_cast<double>(head.hidden[static_cast<size_t>(token * head.hidden_size + j)]) *
           static_cast<double>(head.weight[static_cast<size_t>(v * head.hidden_size + j)]);
    }
    row.log_p.push_back(z * row.inverse_temperature);
    largest = std::max(largest, row.log_p.back());
  }
  for (double z : row.log_p) total += std::exp(z - largest);
  for (double& z : row.log_p) z -= largest + std::log(total);
  for (double log_p : row.log_p) row.entropy -= std::exp(log_p) * log_p;
  return row;
}

struct Gradients {
  std::vector<double> hidden, weight;
};

// The exact chain from d loss / d log p and d loss / d entropy (or empty) of each token.
inline Gradients reference_backward(const Head& head, std::span<const double> g,
                                    std::span<const double> g_entropy) {
  Gradients out;
  out.hidden.assign(head.hidden.size(), 0.0);
  out.weight.assign(head.weight.size(), 0.0);
  for (int64_t token : head.listed()) {
    const size_t t = static_cast<size_t>(token);
    const double ge = g_entropy.empty() ? 0.0 : g_entropy[t];
    if (g[t] == 0.0 && ge == 0.0) continue;
    const ReferenceRow row = reference_row(head, token);
    for (int64_t v = 0; v < head.vocabulary; ++v) {
      const double log_p = row.log_p[static_cast<size_t>(v)], p = std::exp(log_p);
      const double onehot = v == head.targets[t] ? 1.0 : 0.0;
      const double dz =
          row.inverse_temperature * (g[t] * (onehot - p) - ge * p * (log_p + row.entropy));
      for (int64_t j = 0; j < head.hidden_size; ++j) {
        const size_t h = static_cast<size_t>(token * head.hidden_size + j);
        const size_t w = static_cast<size_t>(v * head.hidden_size + j);
        out.hidden[h] += dz * static_cast<double>(head.weight[w]);
        out.weight[w] += dz * static_cast<double>(head.hidden[h]);
      }
    }
  }
  return out;
}

// A batch for this head: the streams lie around its log-probabilities, so that ratios are near one
// and gates and clips act on some tokens. Masked tokens hold garbage unless `clean`.
inline Batch batch_for(const Head& head, uint64_t seed, const std::vector<int>& lengths,
                       bool clean = false) {
  Batch batch = random_batch(seed, lengths, clean);
  for (size_t i = 0; i < batch.pi.size(); ++i) {
    if (!batch.mask[i] && !clean) continue;
    const int64_t token = static_cast<int64_t>(i);
    const double log_p = reference_row(head, token).log_p[static_cast<size_t>(head.targets[i])];
    const double moved = log_p - batch.pi[i];
    for (auto* stream : {&batch.prox, &batch.rollout, &batch.ref, &batch.teacher}) {
      (*stream)[i] = static_cast<double>(static_cast<float>((*stream)[i] + moved));
    }
    batch.pi[i] = log_p;
    batch.advantages[i] = static_cast<double>(static_cast<float>(batch.advantages[i]));
  }
  return batch;
}

struct HeadReference {
  LossResult loss;
  MetricSums metrics;
  std::vector<double> logprobs, entropy;
  Gradients gradients;
};

inline HeadReference reference_head(const Head& head, const LossSpec& spec, Batch batch,
                                    std::optional<double> denominator = {}) {
  HeadReference out;
  out.logprobs.assign(static_cast<size_t>(head.tokens), 0.0);
  out.entropy = out.logprobs;
  for (int64_t token : head.listed()) {
    const size_t t = static_cast<size_t>(token);
    const ReferenceRow row = reference_row(head, token);
    out.logprobs[t] = row.log_p[static_cast<size_t>(head.targets[t])];
    out.entropy[t] = row.entropy;
  }
  batch.pi = out.logprobs;
  out.loss = evaluate_reference(spec, batch.view(), denominator, &out.metrics);
  out.gradients = reference_backward(head, out.loss.grad, {});
  return out;
}

// What the head gives, every output wanted. `d_weight` begins at zero.
struct HeadRun {
  HeadResult result;
  std::vector<float> logprobs, entropy, d_hidden, d_weight;
};

inline HeadRun run_head(ThreadPool& pool, const Head& head, const LossSpec& spec,
                        const Batch& batch, std::optional<double> denominator = {}) {
  HeadRun out;
  out.logprobs.assign(static_cast<size_t>(head.tokens), -77.0f);
  out.entropy = out.logprobs;
  out.d_hidden.assign(head.hidden.size(), -77.0f);
  out.d_weight.assign(head.weight.size(), 0.0f);
  const FloatBatch floats(batch);
  out.result = policy_head(pool, head.problem(), spec, floats.view(), denominator, out.logprobs,
                           out.entropy, out.d_hidden, out.d_weight);
  return out;
}

// Every value within `tolerance` of the largest one, and exact zeros where zero is expected.
inline void expect_near(std::span<const float> got, std::span<const double> expected,
                        double tolerance, const std::string& what, bool exact_zeros = false) {
  ASSERT_EQ(got.size(), expected.size()) << what;
  double largest = 1e-30;
  for (double value : expected) largest = std::max(largest, std::abs(value));
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_NEAR(static_cast<double>(got[i]), expected[i], tolerance * largest) << what << " " << i;
    if (exact_zeros && expected[i] == 0.0) {
      ASSERT_EQ(got[i], 0.0f) << what << " " << i;
    }
  }
}

inline void expect_agrees(const HeadRun& run, const HeadReference& expected,
                          const std::string& where, double tolerance = 2e-5) {
  expect_near(run.logprobs, expected.logprobs, tolerance, where + " logprobs", true);
  expect_near(run.entropy, expected.entropy, tolerance, where + " entropy");
  expect_near(run.d_hidden, expected.gradients.hidden, tolerance, where + " d_hidden", true);
  expect_near(run.d_weight, expected.gradients.weight, tolerance, where + " d_weight");
  double scale = std::abs(expected.loss.loss) + 1e-6;
  for (double g : expected.loss.grad) scale += std::abs(g);
  ASSERT_NEAR(run.result.loss, expected.loss.loss, tolerance * scale) << where;
  for (Slot slot : {Slot::tokens, Slot::dropped, Slot::kept, Slot::sequences}) {
    ASSERT_EQ(run.result.metrics[slot], expected.metrics[slot]) << where;
  }
}

}  // namespace leeway::testing
