// Each step against a plain computation on the host, on the CPU and, if available, on CUDA.

#include "torch/sampling_operations.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "base/rng.h"
#include "engine/sampler.h"
#include "kernels/rows.h"
#include "torch/layer_rows.h"
#include "torch/training_operations.h"

namespace leeway {
namespace {

using at::Tensor;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr at::ScalarType kTypes[] = {at::kFloat, at::kBFloat16};

std::vector<at::Device> devices() {
  std::vector<at::Device> list{at::kCPU};
#ifdef LEEWAY_CUDA
  if (at::hasCUDA()) list.emplace_back(at::kCUDA);
#endif
  return list;
}

Tensor random(std::vector<int64_t> shape, uint64_t seed, double deviation = 1.0) {
  Rng rng(seed);
  Tensor values = at::empty(shape, at::kFloat);
  float* to = values.data_ptr<float>();
  for (int64_t i = 0; i < values.numel(); ++i) to[i] = static_cast<float>(deviation * rng.normal());
  return values;
}

Tensor integers(const std::vector<int32_t>& values) { return at::tensor(values, at::kInt); }

double largest_difference(const Tensor& a, const Tensor& b) {
  return (a.to(at::kCPU, at::kDouble) - b.to(at::kCPU, at::kDouble)).abs().max().item<double>();
}

// ---------------------------------------------------------------------------------------------
// Draws

struct Outcome {
  int32_t id;
  float raw_logprob, processed_logprob;
  bool failed;
};

// One draw for each uniform number, all from the one row.
std::vector<Outcome> draw(at::Device device, const std::vector<float>& logits, float temperature,
                          const std::vector<double>& uniforms) {
  const auto count = static_cast<int64_t>(uniforms.size());
  const float inverse = temperature == 0.0f ? 0.0f : 1.0f / temperature;
  PassRows rows;
  rows.draws = at::ones({count}, at::kInt).to(device);
  rows.inverse_temperatures = at::full({count}, inverse, at::kFloat).to(device);
  rows.uniforms = at::tensor(uniforms, at::kDouble).to(device);
  const Tensor row = at::tensor(logits, at::kFloat);
  const Tensor both = at::stack({at::zeros_like(row), row}).to(device);
  Tensor sampled = at::empty({count, 4}, at::device(device).dtype(at::kInt));
  const Tensor workspace =
      at::empty({draw_workspace_size(both.size(1), count)}, at::device(device).dtype(at::kByte));
  draw_rows(both, {}, rows, workspace, sampled);
  const Tensor host = sampled.to(at::kCPU);
  const auto* at = host.data_ptr<int32_t>();
  std::vector<Outcome> outcomes;
  for (int64_t i = 0; i < count; ++i, at += 4) {
    outcomes.push_back(
        {at[0], std::bit_cast<float>(at[1]), std::bit_cast<float>(at[2]), at[3] != 0});
  }
  return outcomes;
}

TEST(SamplingOperations, DrawsEachTokenByItsShare) {
  for (const at::Device device : devices()) {
    for (const auto& [vocabulary, temperature] : std::vector<std::pair<int64_t, float>>{
             {1, 1.0f}, {50, 1.0f}, {1024, 0.5f}, {2500, 1.5f}}) {
      SCOPED_TRACE(fmt::format("{} {}", device.str(), vocabulary));
      const Tensor z = random({vocabulary}, 7, 3.0);
      const std::vector<float> logits(z.data_ptr<float>(), z.data_ptr<float>() + vocabulary);
      constexpr int kDraws = 500;
      std::vector<double> uniforms;
      for (int i = 0; i < kDraws; ++i) uniforms.push_back((i + 0.5) / kDraws);
      const std::vector<Outcome> outcomes = draw(device, logits, temperature, uniforms);
      std::vector<double> counts(logits.size());
      int32_t before = 0;
      for (const Outcome& outcome : outcomes) {
        ASSERT_FALSE(outcome.failed);
        ASSERT_GE(outcome.id, before) << "tokens come in the order of ids";
        ASSERT_LT(outcome.id, vocabulary);
        before = outcome.id;
        counts[static_cast<size_t>(outcome.id)] += 1.0;
        const auto logprob = [&, id = outcome.id](float inverse) {
          return row_softmax(logits.data(), vocabulary, inverse, id, false).logprob;
        };
        ASSERT_NEAR(outcome.raw_logprob, logprob(1.0f), 1e-5f);
        ASSERT_NEAR(outcome.processed_logprob, logprob(1.0f / temperature), 1e-5f);
      }
      for (int64_t id = 0; id < vocabulary; ++id) {
        const double share =
            std::exp(row_softmax(logits.data(), vocabulary, 1.0f / temperature, id, false).logprob);
        EXPECT_NEAR(counts[static_cast<size_t>(id)], share * kDraws, 1.01) << id;
      }
    }
  }
}

TEST(SamplingOperations, DrawsAsTheHostsSampler) {
  for (const at::Device device : devices()) {
    constexpr int64_t kVocabulary = 3000;
    const Tensor z = random({kVocabulary}, 9, 2.0);
    const std::vector<float> logits(z.data_ptr<float>(), z.data_ptr<float>() + kVocabulary);
    TokenSampler sampler;
    for (const float temperature : {0.0f, 0.7f, 1.0f}) {
      Rng rng(3), same(3);
      std::vector<double> uniforms;
      for (int i = 0; i < 100; ++i) uniforms.push_back(same.uniform());
      int equal = 0;
      for (const Outcome& outcome : draw(device, logits, temperature, uniforms)) {
        const SampledToken token = sampler.sample(logits, {.temperature = temperature}, rng);
        if (outcome.id != token.id) continue;
        ++equal;
        EXPECT_NEAR(outcome.raw_logprob, token.raw_logprob, 1e-5f);
        EXPECT_NEAR(outcome.processed_logprob, token.processed_logprob, 1e-5f);
      }
      EXPECT_GE(equal, 99);
    }
  }
}

TEST(SamplingOperations, DrawsAtTheEdges) {
  for (const at::Device device : devices()) {
    const double most = std::nextafter(1.0, 0.0);
    // The first among equals; the draw is certain.
    std::vector<float> row(2000, 1.0f);
    row[1500] = row[1100] = row[1999] = 4.0f;
    const Outcome first = draw(device, row, 0.0f, {0.9})[0];
    EXPECT_EQ(first.id, 1100);
    EXPECT_EQ(first.processed_logprob, 0.0f);
    // Impossible tokens are never drawn, at either end.
    row.assign(2000, -kInfinity);
    row[1030] = 2.0f, row[1040] = 2.0f;
    const std::vector<Outcome> ends = draw(device, row, 0.5f, {0.0, 0.49, 0.51, most});
    EXPECT_EQ(ends[0].id, 1030);
    EXPECT_EQ(ends[1].id, 1030);
    EXPECT_EQ(ends[2].id, 1040);
    EXPECT_EQ(ends[3].id, 1040);
    EXPECT_NEAR(ends[3].raw_logprob, std::log(0.5f), 1e-6f);
  }
}

TEST(SamplingOperations, SaysWhichRowsAreNoDistribution) {
  for (const at::Device device : devices()) {
    const auto failed = [&](float at_700, float others, float temperature) {
      std::vector<float> row(1500, others);
      row[700] = at_700;
      return draw(device, row, temperature, {0.5})[0].failed;
    };
    for (const float temperature : {0.0f, 1.0f, 0.3f}) {
      EXPECT_TRUE(failed(std::numeric_limits<float>::quiet_NaN(), 1.0f, temperature));
      EXPECT_TRUE(failed(kInfinity, 1.0f, temperature));
      EXPECT_TRUE(failed(-kInfinity, -kInfinity, temperature));
      EXPECT_FALSE(failed(-kInfinity, 1.0f, temperature));
      EXPECT_FALSE(failed(3.0f, -kInfinity, temperature));
    }
    EXPECT_TRUE(failed(1e38f, 0.0f, 1e-3f));
    EXPECT_FALSE(failed(1e38f, 0.0f, 0.0f));
  }
}

// ---------------------------------------------------------------------------------------------
// Attention

constexpr int64_t kMostPositions = 2048;

// Rows at these positions, each of a sequence of its own with blocks all over the store.
PassRows scattered_rows(const std::vector<int32_t>& positions, int64_t blocks, uint64_t seed) {
  std::vector<int32_t> table, starts, order(static_cast<size_t>(blocks));
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
  Rng rng(seed);
  for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[rng.below(i)]);
  for (const int32_t position : positions) {
    starts.push_back(static_cast<int32_t>(table.size()));
    for (int32_t i = 0; i < position / 16 + 1 && position >= 0; ++i) {
      table.push_back(order.back());
      order.pop_back();
    }
  }
  PassRows rows;
  rows.positions = integers(positions);
  rows.starts = integers(starts);
  rows.blocks = integers(table);
  rows.decode_rows = static_cast<int64_t>(positions.size());
  return rows;
}

PassRows moved(PassRows rows, at::Device device) {
  for (Tensor* tensor : {&rows.positions, &rows.starts, &rows.blocks}) {
    *tensor = tensor->to(device);
  }
  return rows;
}

// In float64, key by key.
Tensor plain_attention(const HeadCounts& counts, const PassRows& rows, const Tensor& q,
                       const Tensor& keys, const Tensor& values) {
  Tensor out = at::zeros(q.sizes(), at::kDouble);
  const Tensor wide_keys = keys.to(at::kDouble).flatten(0, 1);
  const Tensor wide_values = values.to(at::kDouble).flatten(0, 1);
  for (int64_t row = 0; row < q.size(0); ++row) {
    const auto position = rows.positions[row].item<int32_t>();
    if (position < 0) continue;
    std::vector<int64_t> places;
    for (int64_t p = 0; p <= position; ++p) {
      const int64_t entry = rows.starts[row].item<int32_t>() + p / 16;
      places.push_back(rows.blocks[entry].item<int32_t>() * 16 + p % 16);
    }
    const Tensor seen = at::tensor(places, at::kLong);
    for (int64_t h = 0; h < counts.query_heads; ++h) {
      const int64_t kv = h * counts.kv_heads / counts.query_heads;
      const Tensor query = q[row].view({counts.query_heads, counts.head_dim})[h].to(at::kDouble);
      const Tensor scores = at::mv(wide_keys.index_select(0, seen).select(1, kv), query) /
                            std::sqrt(static_cast<double>(counts.head_dim));
      const Tensor result =
          at::mv(wide_values.index_select(0, seen).select(1, kv).t(), at::softmax(scores, 0));
      out[row].narrow(0, h * counts.head_dim, counts.head_dim).copy_(result);
    }
  }
  return out;
}

TEST(SamplingOperations, AttendsToPagesWherever) {
  // Few rows, whose keys are split, and many; a row that only fills the pass among them.
  const std::vector<std::vector<int32_t>> passes{
      {0}, {15, 16, 700}, {1, -1, 31, 64, 65, 127, 128, 300, 0, 5, 255, 256, 90, 33, 200, 400}};
  for (const at::Device device : devices()) {
    for (const HeadCounts& counts : std::vector<HeadCounts>{{4, 2, 64},
                                                            {2, 2, 128},
                                                            {7, 1, 64},
                                                            {8, 2, 128},
                                                            {3, 1, 8},
                                                            {2, 1, 80},
                                                            {2, 1, 256}}) {
      for (const at::ScalarType type : kTypes) {
        for (const auto& positions : passes) {
          SCOPED_TRACE(fmt::format("{} {}/{}x{} {} rows {}", device.str(), counts.query_heads,
                                   counts.kv_heads, counts.head_dim, c10::toString(type),
                                   positions.size()));
          const PassRows rows = scattered_rows(positions, 160, 3);
          const auto count = static_cast<int64_t>(positions.size());
          const std::vector<int64_t> shape{160, 16, counts.kv_heads, counts.head_dim};
          const Tensor q = random({count, counts.query_heads * counts.head_dim}, 1).to(type);
          Tensor keys = random(shape, 2).to(type), values = random(shape, 3).to(type);
          const Tensor expected = plain_attention(counts, rows, q, keys, values);
          const Tensor workspace =
              at::empty({attention_workspace_size(counts, kMostPositions, type)},
                        at::device(device).dtype(at::kFloat));
          Tensor out = at::full_like(q, NAN).to(device);
          attend(counts, moved(rows, device), kMostPositions, q.to(device), keys.to(device),
                 values.to(device), workspace, out);
          EXPECT_LT(largest_difference(out, expected), type == at::kFloat ? 1e-5 : 2e-2);
        }
      }
    }
  }
}

TEST(SamplingOperations, NeverReadsKeysThatAreNotThere) {
  for (const at::Device device : devices()) {
    const HeadCounts counts{2, 1, 64};
    const PassRows rows = scattered_rows({4, 40}, 8, 3);
    Tensor keys = at::full({8, 16, 1, 64}, NAN), values = keys.clone();
    for (int64_t row = 0; row < 2; ++row) {
      for (int64_t p = 0; p <= rows.positions[row].item<int32_t>(); ++p) {
        const int64_t entry = rows.starts[row].item<int32_t>() + p / 16;
        const int64_t block = rows.blocks[entry].item<int32_t>();
        keys[block][p % 16].fill_(1.0);
        values[block][p % 16].fill_(2.0);
      }
    }
    const Tensor workspace =
        at::empty({attention_workspace_size(counts, kMostPositions, at::kFloat)},
                  at::device(device).dtype(at::kFloat));
    Tensor out = at::empty({2, 128}, at::device(device).dtype(at::kFloat));
    attend(counts, moved(rows, device), kMostPositions, random({2, 128}, 1).to(device),
           keys.to(device), values.to(device), workspace, out);
    EXPECT_LT(largest_difference(out, at::full({2, 128}, 2.0)), 1e-5);
  }
}

// ---------------------------------------------------------------------------------------------
// Rows

TEST(SamplingOperations, StoresHeadsNormedAndTurned) {
  for (const at::Device device : devices()) {
    for (const at::ScalarType type : kTypes) {
      for (const int64_t head_dim : {8, 64, 80, 128, 256}) {
        for (const bool normed : {false, true}) {
          const HeadCounts counts{4, 2, head_dim};
          const int64_t half = head_dim / 2;
          const std::vector<int32_t> positions{3, -1, 17, 40};
          const PassRows rows = scattered_rows(positions, 12, 5);
          const Tensor qkv = random({4, 8 * head_dim}, 6).to(type);
          const Tensor query_norm = random({head_dim}, 7).to(type);
          const Tensor key_norm = random({head_dim}, 8).to(type);
          const Tensor angles = random({64, half}, 9, 3.0);
          HeadWeights heads{counts, {}, {}, 1e-6, {}};
          heads.rope.cosines = angles.cos().to(device);
          heads.rope.sines = angles.sin().to(device);
          if (normed) {
            heads.query_norm = query_norm.to(device), heads.key_norm = key_norm.to(device);
          }
          const auto store = at::device(device).dtype(type);
          Tensor q = at::zeros({4, 4 * head_dim}, store);
          Tensor keys = at::full({12, 16, 2, head_dim}, 7.0, store), values = keys.clone();
          store_heads(heads, moved(rows, device), qkv.to(device), q, keys, values);

          Tensor written = at::full({12, 16, 2, head_dim}, 7.0, at::kFloat);
          const auto turned = [&](Tensor x, const Tensor& norm, int64_t position) {
            if (normed) {
              x = x * at::rsqrt(x.square().mean(-1, true) + 1e-6) * norm.to(at::kFloat);
            }
            const Tensor a = x.narrow(1, 0, half), b = x.narrow(1, half, half);
            const Tensor c = angles[position].cos(), s = angles[position].sin();
            return at::cat({a * c - b * s, b * c + a * s}, 1);
          };
          const double tolerance = type == at::kFloat ? 1e-5 : 0.1;
          Tensor written_values = written.clone();
          for (int64_t row = 0; row < 4; ++row) {
            const int64_t position = positions[static_cast<size_t>(row)];
            if (position < 0) continue;
            const Tensor all = qkv[row].to(at::kFloat).view({8, head_dim});
            const Tensor queries = turned(all.narrow(0, 0, 4), query_norm, position);
            EXPECT_LT(largest_difference(q[row].view({4, head_dim}), queries), tolerance);
            const int64_t entry = rows.starts[row].item<int32_t>() + position / 16;
            const int64_t block = rows.blocks[entry].item<int32_t>();
            written[block][position % 16] = turned(all.narrow(0, 4, 2), key_norm, position);
            written_values[block][position % 16] = all.narrow(0, 6, 2);
          }
          const std::vector<int32_t> known{3, 0, 17, 40};
          const Tensor trained =
              pack_heads(heads, integers(known).to(device), qkv.to(device)).q.flatten(1);
          for (const int64_t row : {0, 2, 3}) {
            EXPECT_EQ(largest_difference(q[row], trained[row]), 0.0) << "as in training";
          }
          EXPECT_LT(largest_difference(keys, written), tolerance);
          EXPECT_EQ(largest_difference(values, written_values), 0.0);
        }
      }
    }
  }
}

// Decode rows have their heads made by the kernel that attends. The pages that it fills are full of
// NaN before, so that a key or value which is read too early shows.
TEST(SamplingOperations, HeadsMadeWhileAttendingHaveTheBitsOfTwoSteps) {
  std::vector<int32_t> many;
  for (int32_t i = 0; i < 300; ++i) many.push_back(i % 37 == 5 ? -1 : i * 7 % 210);
  const std::vector<std::vector<int32_t>> passes{
      {0}, {15, 16, 700}, {63, 64, -1, 65, 127, 128, 129, 511, 512, 513, 48, 31, 32}, many};
  for (const at::Device device : devices()) {
    for (const HeadCounts& counts : std::vector<HeadCounts>{{16, 8, 128},
                                                            {9, 3, 64},
                                                            {2, 2, 32},
                                                            {40, 2, 64},
                                                            {32, 1, 128},
                                                            {3, 1, 256},
                                                            {4, 2, 80}}) {
      for (const bool normed : {false, true}) {
        for (const auto& positions : passes) {
          SCOPED_TRACE(fmt::format("{} {}/{}x{} rows {}", device.str(), counts.query_heads,
                                   counts.kv_heads, counts.head_dim, positions.size()));
          const int64_t blocks = positions.size() > 100 ? 4400 : 240;
          const auto count = static_cast<int64_t>(positions.size());
          const PassRows rows = moved(scattered_rows(positions, blocks, 3), device);
          const auto like = at::device(device).dtype(at::kBFloat16);
          const int64_t heads_in_all = counts.query_heads + 2 * counts.kv_heads;
          const Tensor qkv = random({count, heads_in_all * counts.head_dim}, 6).to(like);
          const Tensor angles = random({1024, counts.head_dim / 2}, 9, 3.0).to(device);
          HeadWeights heads{counts, {}, {}, 1e-6, {}};
          heads.rope.cosines = angles.cos(), heads.rope.sines = angles.sin();
          if (normed) {
            heads.query_norm = random({counts.head_dim}, 7).to(like);
            heads.key_norm = random({counts.head_dim}, 8).to(like);
          }
          struct Result {
            Tensor keys, values, out;
          };
          const auto attended = [&](bool at_once) {
            Tensor q = at::zeros({count, counts.query_heads * counts.head_dim}, like);
            Result result{random({blocks, 16, counts.kv_heads, counts.head_dim}, 2).to(like),
                          {},
                          at::full_like(q, NAN)};
            result.values = result.keys.flip(0).contiguous();
            const Tensor there = at::nonzero(rows.positions >= 0).squeeze(1);
            const Tensor at = rows.positions.index_select(0, there);
            const Tensor entries = rows.starts.index_select(0, there) + at::div(at, 16, "floor");
            const Tensor places = rows.blocks.index_select(0, entries) * 16 + at::remainder(at, 16);
            for (Tensor* pages : {&result.keys, &result.values}) {
              pages->flatten(0, 1).index_fill_(0, places.to(at::kLong), NAN);
            }
            const Tensor workspace =
                at::empty({attention_workspace_size(counts, kMostPositions, at::kBFloat16)},
                          at::device(device).dtype(at::kFloat));
            if (at_once) {
              store_and_attend(heads, rows, kMostPositions, qkv, q, result.keys, result.values,
                               workspace, result.out);
            } else {
              store_heads(heads, rows, qkv, q, result.keys, result.values);
              attend(counts, rows, kMostPositions, q, result.keys, result.values, workspace,
                     result.out);
            }
            return result;
          };
          const Result two = attended(false), one = attended(true);
          EXPECT_TRUE(at::equal(two.keys, one.keys));
          EXPECT_TRUE(at::equal(two.values, one.values));
          EXPECT_TRUE(at::equal(two.out, one.out));
        }
      }
    }
  }
}

// Passes of prompts have a kernel of their own.
TEST(SamplingOperations, ManyRowsOfHeadsHaveTheBitsOfFew) {
  constexpr int64_t kRows = 1100, kPiece = 100;
  for (const at::Device device : devices()) {
    for (const at::ScalarType type : kTypes) {
      for (const auto& [counts, normed] : std::vector<std::pair<HeadCounts, bool>>{
               {{4, 2, 128}, true}, {{9, 3, 64}, false}, {{6, 3, 16}, true}, {{4, 2, 80}, true}}) {
        SCOPED_TRACE(fmt::format("{} {}", device.str(), counts.head_dim));
        std::vector<int32_t> positions;
        for (int32_t i = 0; i < kRows; ++i) positions.push_back(i % 50 == 7 ? -1 : i % 40);
        const PassRows all = moved(scattered_rows(positions, 3 * kRows, 5), device);
        const int64_t heads_in_all = counts.query_heads + 2 * counts.kv_heads;
        const Tensor qkv = random({kRows, heads_in_all * counts.head_dim}, 6).to(device, type);
        const Tensor angles = random({64, counts.head_dim / 2}, 9, 3.0).to(device);
        HeadWeights heads{counts, {}, {}, 1e-6, {}};
        heads.rope.cosines = angles.cos(), heads.rope.sines = angles.sin();
        if (normed) {
          heads.query_norm = random({counts.head_dim}, 7).to(device, type);
          heads.key_norm = random({counts.head_dim}, 8).to(device, type);
        }
        struct Stored {
          Tensor q, keys, values;
        };
        const auto stored = [&](int64_t piece) {
          const auto like = at::device(device).dtype(type);
          Stored to{at::zeros({kRows, counts.query_heads * counts.head_dim}, like),
                    at::zeros({3 * kRows, 16, counts.kv_heads, counts.head_dim}, like),
                    {}};
          to.values = to.keys.clone();
          for (int64_t first = 0; first < kRows; first += piece) {
            PassRows rows = all;
            rows.positions = all.positions.narrow(0, first, piece);
            rows.starts = all.starts.narrow(0, first, piece);
            Tensor q = to.q.narrow(0, first, piece);
            store_heads(heads, rows, qkv.narrow(0, first, piece), q, to.keys, to.values);
          }
          // Queries of padding rows are not defined, and not compared.
          to.q.index_fill_(0, at::nonzero(all.positions < 0).squeeze(1), 0.0);
          return to;
        };
        const Stored few = stored(kPiece), many = stored(kRows);
        EXPECT_TRUE(at::equal(few.q, many.q));
        EXPECT_TRUE(at::equal(few.keys, many.keys));
        EXPECT_TRUE(at::equal(few.values, many.values));
      }
    }
  }
}

TEST(SamplingOperations, AddsAndNormsRows) {
  for (const at::Device device : devices()) {
    for (const at::ScalarType type : kTypes) {
      for (const int64_t width : {24, 256, 333, 576, 1000, 1024, 4096, 5000, 8192}) {
        const Tensor x = random({5, width}, 1).to(type), delta = random({5, width}, 2).to(type);
        const Tensor weight = random({width}, 3).to(type);
        const auto normed = [&](const Tensor& rows) {
          const Tensor wide = rows.to(at::kFloat);
          return wide * at::rsqrt(wide.square().mean(-1, true) + 1e-6) * weight.to(at::kFloat);
        };
        const double tolerance = type == at::kFloat ? 1e-5 : 0.1;
        Tensor stream = x.to(device, type, false, /*copy=*/true), y = at::empty_like(stream);
        add_norm(stream, Tensor(), weight.to(device), 1e-6, y);
        EXPECT_EQ(largest_difference(stream, x), 0.0);
        EXPECT_LT(largest_difference(y, normed(x)), tolerance);
        PassRows rows;
        rows.logit_rows = integers({4, 0, 4}).to(device);
        Tensor last = at::empty({3, width}, y.options());
        add_norm_of_logit_rows(stream, delta.to(device), rows, weight.to(device), 1e-6, last);
        EXPECT_EQ(largest_difference(stream, x), 0.0);
        add_norm(stream, delta.to(device), weight.to(device), 1e-6, y);
        EXPECT_EQ(largest_difference(stream, x + delta), 0.0);
        EXPECT_LT(largest_difference(y, normed(x + delta)), tolerance);
        EXPECT_EQ(largest_difference(last, y.index_select(0, rows.logit_rows)), 0.0);
        EXPECT_EQ(largest_difference(y, rms_norm(stream, weight.to(device), 1e-6)), 0.0)
            << "training has the same numbers";
      }
    }
  }
}

TEST(SamplingOperations, GatesEmbedsAndCopies) {
  for (const at::Device device : devices()) {
    for (const at::ScalarType type : kTypes) {
      const Tensor gate_up = random({3, 80}, 1).to(type);
      const Tensor wide = gate_up.to(at::kFloat);
      Tensor s = at::empty({3, 40}, at::device(device).dtype(type));
      swiglu_rows(gate_up.to(device), s);
      EXPECT_LT(largest_difference(s, at::silu(wide.narrow(1, 0, 40)) * wide.narrow(1, 40, 40)),
                type == at::kFloat ? 1e-5 : 0.1);

      const Tensor table = random({20, 24}, 2).to(type);
      PassRows rows;
      rows.tokens = integers({3, 19, 3}).to(device);
      Tensor x = at::empty({3, 24}, at::device(device).dtype(type));
      embed(table.to(device), rows, x);
      EXPECT_EQ(largest_difference(x, table.index_select(0, integers({3, 19, 3}))), 0.0);

      Tensor kv = random({4, 6, 16, 1, 8}, 3).to(type);
      Tensor expected = kv.clone();
      expected.select(1, 5).copy_(kv.select(1, 0));
      expected.select(1, 2).copy_(kv.select(1, 3));
      Tensor on_device = kv.to(device);
      copy_kv_blocks(on_device, integers({0, 5, 3, 2}).view({2, 2}));
      EXPECT_EQ(largest_difference(on_device, expected), 0.0);
    }
  }
}

TEST(SamplingOperations, AGatedProductHasTheBitsOfTwoSteps) {
  for (const at::Device device : devices()) {
    for (const at::ScalarType type : kTypes) {
      const auto on = at::device(device).dtype(type);
      const auto products = make_products(device);
      for (const int64_t rows : {1, 5, 70, 300}) {
        const Tensor x = random({rows, 64}, 3).to(on), weight = random({160, 64}, 4).to(on);
        Tensor gate_up = at::empty({rows, 160}, on), s = at::empty({rows, 80}, on);
        Tensor own = at::empty_like(s);
        project(products.get(), x, weight.t(), {}, gate_up);
        swiglu_rows(gate_up, s);
        project_gated(products.get(), x, weight.t(), gate_up, own);
        EXPECT_EQ(largest_difference(own, s), 0.0) << rows;
      }
    }
  }
}

TEST(SamplingOperations, LogitsAreFloat32) {
  for (const at::Device device : devices()) {
    const Tensor x = random({3, 64}, 1).to(at::kBFloat16);
    const Tensor weight = random({100, 64}, 2).to(at::kBFloat16);
    Tensor y = at::empty({3, 100}, at::device(device).dtype(at::kFloat));
    project_wide(make_products(device).get(), x.to(device), weight.to(device).t(), y);
    const Tensor expected = at::mm(x.to(at::kDouble), weight.to(at::kDouble).t());
    EXPECT_LT(largest_difference(y, expected), 1e-4);
  }
}

}  // namespace
}  // namespace leeway
