// The log-probabilities that are recorded with a draw in bf16: the formula on every device, and on
// CUDA the very bits of the trainer's head.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "torch/sampling_operations.h"
#ifdef LEEWAY_CUDA
#include "torch/ops/cuda_head.h"
#endif

namespace leeway {
namespace {

using at::Tensor;

std::vector<at::Device> devices() {
  std::vector<at::Device> list{at::kCPU};
#ifdef LEEWAY_CUDA
  if (at::hasCUDA()) list.emplace_back(at::kCUDA);
#endif
  return list;
}

struct Drawn {
  Tensor ids;                               // int64 [N]
  Tensor raw_logprobs, processed_logprobs;  // float32 [N]
};

// One draw for each row of `hidden`.
Drawn draw(const Tensor& hidden, const Tensor& weight, const Tensor& temperatures) {
  const int64_t count = hidden.size(0), vocabulary = weight.size(0);
  const auto on = [&](at::ScalarType type) { return hidden.options().dtype(type); };
  Tensor logits = at::empty({count, vocabulary}, on(at::kFloat));
  project_wide(make_products(hidden.device()).get(), hidden, weight.t(), logits);
  PassRows rows;
  rows.draws = at::arange(count, on(at::kInt));
  rows.inverse_temperatures = at::where(temperatures == 0.0, at::zeros_like(temperatures),
                                        at::ones_like(temperatures) / temperatures);
  rows.uniforms = at::rand({count}, on(at::kDouble));
  const Tensor workspace = at::empty({draw_workspace_size(vocabulary, count)}, on(at::kByte));
  Tensor sampled = at::empty({count, 4}, on(at::kInt));
  draw_rows(logits, {hidden, weight}, rows, workspace, sampled);
  EXPECT_EQ(sampled.select(1, 3).abs().sum().item<int64_t>(), 0);
  const auto floats = [&](int64_t column) {
    return sampled.select(1, column).contiguous().view(at::kFloat);
  };
  return {sampled.select(1, 0).to(at::kLong), floats(1), floats(2)};
}

// Temperatures in turn, on the device of `like`.
Tensor temperatures_of(int64_t count, const std::vector<float>& values, const Tensor& like) {
  std::vector<float> all;
  for (int64_t i = 0; i < count; ++i) {
    all.push_back(values[static_cast<size_t>(i) % values.size()]);
  }
  return at::tensor(all, at::kFloat).to(like.device());
}

TEST(DrawnLogprobs, AreThoseOfRoundedLogitsWithTheTokensOwn) {
  for (const at::Device device : devices()) {
    for (const int64_t vocabulary : {1, 7, 130, 5000}) {
      SCOPED_TRACE(fmt::format("{} {}", device.str(), vocabulary));
      at::manual_seed(3);
      const Tensor hidden = at::randn({24, 64}).to(device, at::kBFloat16);
      const Tensor weight = (0.4 * at::randn({vocabulary, 64})).to(device, at::kBFloat16);
      const Tensor temperatures = temperatures_of(24, {1.0f, 0.7f, 0.0f, 1.6f}, hidden);
      const Drawn drawn = draw(hidden, weight, temperatures);
      const Tensor exact = at::mm(hidden.to(at::kDouble), weight.to(at::kDouble).t());
      const Tensor ids = drawn.ids.unsqueeze(1);
      const Tensor z = exact.to(at::kFloat)
                           .to(at::kBFloat16)
                           .to(at::kDouble)
                           .scatter(1, ids, exact.gather(1, ids));
      const auto expected = [&](const Tensor& inverse) {
        return at::log_softmax(z * inverse.unsqueeze(1), 1).gather(1, ids).squeeze(1);
      };
      const Tensor certain = temperatures == 0.0;
      const Tensor inverse = at::ones_like(temperatures) / temperatures.masked_fill(certain, 1.0);
      const auto largest = [](const Tensor& difference) {
        return difference.abs().max().item<double>();
      };
      // A product's rounding may differ from that of float64 where it decides.
      EXPECT_LT(largest(drawn.raw_logprobs - expected(at::ones_like(inverse))), 2e-3);
      EXPECT_LT(largest(drawn.processed_logprobs - expected(inverse).masked_fill(certain, 0.0)),
                2e-3);
      EXPECT_TRUE(at::equal(drawn.ids.masked_select(certain),
                            at::mm(hidden.to(at::kFloat), weight.to(at::kFloat).t())
                                .argmax(1)
                                .masked_select(certain)));
    }
  }
}

#ifdef LEEWAY_CUDA

int64_t different_bits(const Tensor& a, const Tensor& b) {
  return a.contiguous().view(at::kInt).ne(b.contiguous().view(at::kInt)).sum().item<int64_t>();
}

// The trainer's head for the drawn tokens, in batches of `rows_at_a_time`.
Tensor trained(const Tensor& hidden, const Tensor& weight, const Tensor& ids,
               const Tensor& temperatures, int64_t rows_at_a_time) {
  std::vector<Tensor> parts;
  for (int64_t first = 0; first < hidden.size(0); first += rows_at_a_time) {
    const int64_t count = std::min(rows_at_a_time, hidden.size(0) - first);
    const auto part = [&](const Tensor& all) {
      return all.defined() ? all.narrow(0, first, count).contiguous() : all;
    };
    parts.push_back(
        cuda::head_logprobs({part(hidden), weight, part(ids), Tensor(), part(temperatures)}, {})
            .first);
  }
  return at::cat(parts);
}

// Numbers whose products sum without rounding in any order: equal logits whatever the product does.
TEST(DrawnLogprobs, HaveTheBitsOfTheTrainersHeadForEveryVocabulary) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no GPU";
  int64_t rows = 0;
  for (const int64_t vocabulary :
       {1,    2,    7,     8,     9,     63,    64,    65,     320,    2047,
        2048, 2049, 16383, 16385, 32000, 49152, 50257, 128256, 151936, 151937}) {
    for (const float temperature : {1.0f, 0.6f, 1.3f}) {
      SCOPED_TRACE(fmt::format("V {} temperature {}", vocabulary, temperature));
      at::manual_seed(vocabulary);
      const auto on = at::device(at::kCUDA).dtype(at::kBFloat16);
      const Tensor hidden = at::randint(-8, 9, {64, 96}, on) / 8;
      const Tensor weight = at::randint(-8, 9, {vocabulary, 96}, on) / 16;
      const Tensor temperatures = temperatures_of(64, {temperature}, hidden);
      const Drawn drawn = draw(hidden, weight, temperatures);
      rows += 64;
      EXPECT_EQ(different_bits(drawn.processed_logprobs,
                               trained(hidden, weight, drawn.ids, temperatures, 64)),
                0);
      EXPECT_EQ(
          different_bits(drawn.raw_logprobs, trained(hidden, weight, drawn.ids, Tensor(), 64)), 0);
    }
  }
  fmt::print("{} rows, each at a temperature and without one\n", rows);
}

// Shapes of models, random numbers, rows in batches of other sizes.
TEST(DrawnLogprobs, HaveTheBitsOfTheTrainersHeadInOtherBatches) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no GPU";
  int64_t rows = 0;
  for (const auto& [vocabulary, hidden_size] :
       std::vector<std::pair<int64_t, int64_t>>{{151936, 1024}, {49152, 576}, {128256, 4096}}) {
    at::manual_seed(hidden_size);
    const auto on = at::device(at::kCUDA);
    const Tensor hidden = at::randn({512, hidden_size}, on).to(at::kBFloat16);
    const double deviation = 2.0 / std::sqrt(static_cast<double>(hidden_size));
    const Tensor weight = (deviation * at::randn({vocabulary, hidden_size}, on)).to(at::kBFloat16);
    const Tensor temperatures = temperatures_of(512, {1.0f, 0.8f, 1.2f}, hidden);
    for (const int64_t at_a_time : {8, 256, 512}) {
      std::vector<Tensor> ids, raw, processed;
      for (int64_t first = 0; first < 512; first += at_a_time) {
        const Drawn drawn = draw(hidden.narrow(0, first, at_a_time), weight,
                                 temperatures.narrow(0, first, at_a_time));
        ids.push_back(drawn.ids);
        raw.push_back(drawn.raw_logprobs), processed.push_back(drawn.processed_logprobs);
      }
      rows += 512;
      for (const int64_t trained_at_a_time : {16, 100, 512}) {
        SCOPED_TRACE(fmt::format("V {} H {}, drawn {} at a time, trained {}", vocabulary,
                                 hidden_size, at_a_time, trained_at_a_time));
        EXPECT_EQ(different_bits(at::cat(processed), trained(hidden, weight, at::cat(ids),
                                                             temperatures, trained_at_a_time)),
                  0);
        EXPECT_EQ(different_bits(at::cat(raw), trained(hidden, weight, at::cat(ids), Tensor(),
                                                       trained_at_a_time)),
                  0);
      }
    }
  }
  fmt::print("{} rows\n", rows);
}

#endif

}  // namespace
}  // namespace leeway
