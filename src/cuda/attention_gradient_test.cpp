// The gradient of attention by cuDNN, against the formula in double on the host.
#include "cuda/attention_gradient.h"

#include <cuda_bf16.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "base/rng.h"
#include "cuda/gpu_test_support.h"

namespace leeway::cuda {
namespace {

using Numbers = std::vector<__nv_bfloat16>;

double value_of(__nv_bfloat16 x) { return static_cast<double>(__bfloat162float(x)); }

Numbers random_numbers(int64_t count, Rng& rng) {
  Numbers numbers(static_cast<size_t>(count));
  for (auto& number : numbers) number = __float2bfloat16(static_cast<float>(rng.normal()));
  return numbers;
}

// Values lie among other numbers, as in the product of queries, keys and values.
struct Problem {
  HeadSizes sizes;
  std::vector<int32_t> first_rows, lengths;
  int64_t rows = 0, longest = 0, v_stride = 0;
  Numbers q, k, v, d_out, out;
  std::vector<float> lse;
  std::vector<double> d_q, d_k, d_v;

  // Sequences are listed in another order than they lie in.
  Problem(const HeadSizes& of, std::vector<int32_t> of_lengths)
      : sizes(of), lengths(std::move(of_lengths)) {
    for (size_t s = lengths.size(); s-- > 0;) {
      first_rows.insert(first_rows.begin(), static_cast<int32_t>(rows));
      rows += lengths[s];
      longest = std::max<int64_t>(longest, lengths[s]);
    }
    Rng rng(4);
    const auto& [heads, kv_heads, head_dim] = sizes;
    v_stride = (heads + 2 * kv_heads) * head_dim;
    q = random_numbers(rows * heads * head_dim, rng);
    k = random_numbers(rows * kv_heads * head_dim, rng);
    v = random_numbers(rows * v_stride, rng);
    d_out = random_numbers(rows * heads * head_dim, rng);
    out.resize(q.size());
    lse.resize(static_cast<size_t>(rows * heads));
    d_q.resize(q.size()), d_k.resize(k.size()), d_v.resize(k.size());
    for (size_t s = 0; s < lengths.size(); ++s) {
      for (int i = 0; i < lengths[s]; ++i) {
        for (int64_t head = 0; head < heads; ++head) add_row(first_rows[s], i, head);
      }
    }
  }

  // Query `i` of the sequence that begins at row `first`, and keys 0 .. i.
  void add_row(int64_t first, int i, int64_t head) {
    const int64_t D = sizes.head_dim, kv_head = head * sizes.kv_heads / sizes.query_heads;
    const double scale = 1.0 / std::sqrt(static_cast<double>(D));
    const int64_t row = ((first + i) * sizes.query_heads + head) * D;
    const auto key = [&](int j) { return ((first + j) * sizes.kv_heads + kv_head) * D; };
    const auto value = [&](int j) { return (first + j) * v_stride + kv_head * D; };
    const auto dot = [&](const Numbers& a, int64_t at_a, const Numbers& b, int64_t at_b) {
      double sum = 0.0;
      for (int64_t d = 0; d < D; ++d) sum += value_of(a[at_a + d]) * value_of(b[at_b + d]);
      return sum;
    };
    std::vector<double> shares, d_shares;
    for (int j = 0; j <= i; ++j) {
      shares.push_back(std::exp(scale * dot(q, row, k, key(j))));
      d_shares.push_back(dot(d_out, row, v, value(j)));
    }
    double sum = 0.0, mean = 0.0;
    for (const double share : shares) sum += share;
    for (int j = 0; j <= i; ++j) mean += (shares[j] /= sum) * d_shares[j];
    lse[(first + i) * sizes.query_heads + head] = static_cast<float>(std::log(sum));
    for (int64_t d = 0; d < D; ++d) {
      double mixed = 0.0;
      for (int j = 0; j <= i; ++j) {
        const double d_score = scale * shares[j] * (d_shares[j] - mean);
        mixed += shares[j] * value_of(v[value(j) + d]);
        d_q[row + d] += d_score * value_of(k[key(j) + d]);
        d_k[key(j) + d] += d_score * value_of(q[row + d]);
        d_v[key(j) + d] += shares[j] * value_of(d_out[row + d]);
      }
      out[row + d] = __float2bfloat16(static_cast<float>(mixed));
    }
  }
};

double relative_error(const Numbers& got, const std::vector<double>& expected) {
  double error = 0.0, square = 0.0;
  for (size_t i = 0; i < got.size(); ++i) {
    const double difference = value_of(got[i]) - expected[i];
    error += difference * difference, square += expected[i] * expected[i];
  }
  return std::sqrt(error / square);
}

TEST(AttentionGradient, IsThatOfTheFormula) {
  LEEWAY_NEEDS_GPU();
  AttentionGradients gradients;
  for (const Problem& p :
       {Problem({4, 2, 64}, {1, 7, 64, 129, 200}), Problem({16, 8, 128}, {2, 65, 100, 1}),
        Problem({9, 3, 64}, {40, 128, 5, 1, 1, 1, 3, 2, 70}), Problem({4, 4, 16}, {40, 128})}) {
    const DeviceArray<int32_t> first_rows(p.first_rows), lengths(p.lengths);
    const DeviceArray<__nv_bfloat16> q(p.q), k(p.k), v(p.v), out(p.out), d_out(p.d_out);
    const DeviceArray<__nv_bfloat16> d_q(p.q.size()), d_k(p.k.size()), d_v(p.k.size());
    const DeviceArray<float> lse(p.lse);
    AttentionGradient problem;
    problem.sizes = p.sizes, problem.rows = p.rows, problem.longest = p.longest;
    problem.sequences = static_cast<int64_t>(p.lengths.size());
    problem.first_rows = first_rows.data(), problem.lengths = lengths.data();
    problem.q = q.data(), problem.k = k.data(), problem.v = v.data();
    problem.v_stride = p.v_stride;
    problem.out = out.data(), problem.d_out = d_out.data(), problem.lse = lse.data();
    problem.d_q = d_q.data(), problem.d_k = d_k.data(), problem.d_v = d_v.data();
    const std::optional<int64_t> bytes = gradients.workspace_bytes(problem);
    ASSERT_TRUE(bytes.has_value()) << p.sizes.head_dim;
    const DeviceArray<char> workspace(static_cast<size_t>(*bytes));
    gradients.run(problem, workspace.data(), nullptr);
    // Weights and their gradients are rounded to bf16, 2^-9 each, before their products.
    EXPECT_LT(relative_error(d_q.values(), p.d_q), 0.01) << p.sizes.head_dim;
    EXPECT_LT(relative_error(d_k.values(), p.d_k), 0.01) << p.sizes.head_dim;
    EXPECT_LT(relative_error(d_v.values(), p.d_v), 0.01) << p.sizes.head_dim;
  }
}

TEST(AttentionGradient, FewPlansServeManyBatches) {
  std::set<AttentionPlanShape> shapes;
  for (int64_t sequences = 5; sequences <= 40; ++sequences) {
    for (int64_t longest = 1000; longest <= 4000; longest += 7) {
      for (const int64_t rows : {14000, 15000, 16000, 16384}) {
        const AttentionPlanShape shape = plan_shape(sequences, longest, rows);
        EXPECT_GE(shape.sequences, sequences);
        EXPECT_GE(shape.longest, longest);
        EXPECT_GE(shape.rows, rows);
        EXPECT_LE(shape.rows, rows + rows / 4);
        shapes.insert(shape);
      }
    }
  }
  EXPECT_LE(shapes.size(), 4u * 3u * 2u);
}

}  // namespace
}  // namespace leeway::cuda
