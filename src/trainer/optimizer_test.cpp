#include "trainer/optimizer.h"

#include <bit>
#include <cmath>
#include <numbers>

#include "trainer/test_support.h"

namespace leeway {
namespace {

using testing::same_bits;
using testing::small_config;
using testing::small_parameters;

Parameters random_gradient(const ModelConfig& config, uint64_t seed) {
  Parameters gradient(config);
  Rng rng(seed);
  for (size_t i = 0; i < gradient.table().size(); ++i) {
    for (float& value : gradient.of(i)) value = static_cast<float>(rng.normal());
  }
  return gradient;
}

// Large enough for several blocks of work.
ModelConfig large_config() {
  ModelConfig config = small_config(Family::qwen2);
  config.vocab_size = 2000;
  return config;
}

TEST(AdamW, FollowsTheFormulaInDouble) {
  ThreadPool pool(2);
  const ModelConfig config = small_config(Family::qwen2);  // has biases
  Parameters parameters = small_parameters(config, 3);
  testing::roughen(parameters, 4);
  OptimizerTable table;
  table.beta1 = 0.8, table.beta2 = 0.95, table.epsilon = 1e-3, table.weight_decay = 0.3;
  AdamW optimizer(config);
  std::vector<std::vector<double>> p(parameters.table().size()), m(p.size()), v(p.size());
  for (size_t i = 0; i < p.size(); ++i) {
    p[i].assign(parameters.of(i).begin(), parameters.of(i).end());
    m[i].resize(p[i].size());
    v[i].resize(p[i].size());
  }
  for (int n = 1; n <= 6; ++n) {
    const double rate = 0.01 * n, scale = n == 4 ? 0.25 : 1.0;
    const Parameters gradient = random_gradient(config, static_cast<uint64_t>(n));
    const Parameters before = gradient;
    optimizer.step(pool, table, rate, scale, gradient, parameters);
    ASSERT_TRUE(same_bits(gradient, before));
    ASSERT_EQ(optimizer.steps(), n);
    for (size_t i = 0; i < p.size(); ++i) {
      const bool decays = parameters.table()[i].shape.size() == 2;
      for (size_t k = 0; k < p[i].size(); ++k) {
        const double g = scale * gradient.of(i)[k];
        m[i][k] = table.beta1 * m[i][k] + (1 - table.beta1) * g;
        v[i][k] = table.beta2 * v[i][k] + (1 - table.beta2) * g * g;
        if (decays) p[i][k] *= 1 - rate * table.weight_decay;
        p[i][k] -= rate * (m[i][k] / (1 - std::pow(table.beta1, n))) /
                   (std::sqrt(v[i][k] / (1 - std::pow(table.beta2, n))) + table.epsilon);
        ASSERT_NEAR(parameters.of(i)[k], p[i][k], 2e-6 * (1.0 + std::abs(p[i][k])))
            << parameters.table()[i].name << "[" << k << "] step " << n;
      }
    }
  }
}

TEST(AdamW, GivesTheSameBitsForAnyThreads) {
  const ModelConfig config = large_config();
  std::vector<Parameters> results;
  for (int threads = 1; threads <= 3; ++threads) {
    ThreadPool pool(threads);
    Parameters parameters = small_parameters(config, 3);
    AdamW optimizer(config);
    for (uint64_t n = 0; n < 3; ++n) {
      optimizer.step(pool, {}, 0.01, 0.5, random_gradient(config, n), parameters);
    }
    results.push_back(std::move(parameters));
  }
  EXPECT_TRUE(same_bits(results[0], results[1]));
  EXPECT_TRUE(same_bits(results[0], results[2]));
}

TEST(GradientNorm, IsTheSumInDoubleWhateverTheThreads) {
  const Parameters gradient = random_gradient(large_config(), 5);
  double sum = 0.0;
  for (float value : gradient.flat()) sum += double{value} * double{value};
  std::vector<uint64_t> bits;
  for (int threads = 1; threads <= 3; ++threads) {
    ThreadPool pool(threads);
    const double norm = gradient_norm(pool, gradient);
    EXPECT_NEAR(norm, std::sqrt(sum), 1e-12 * std::sqrt(sum));
    bits.push_back(std::bit_cast<uint64_t>(norm));
  }
  EXPECT_EQ(bits[0], bits[1]);
  EXPECT_EQ(bits[0], bits[2]);
}

TEST(GradientNorm, DoesNotOverflowWhereFloatWould) {
  ThreadPool pool(1);
  Parameters gradient(small_config(Family::llama));
  gradient.of(0)[3] = 3e30f;
  gradient.of(1)[0] = 4e30f;
  EXPECT_NEAR(gradient_norm(pool, gradient) / 5e30, 1.0, 1e-6);
}

TEST(GradientNorm, IsNotFiniteIfANumberIsNot) {
  ThreadPool pool(2);
  Parameters gradient = random_gradient(large_config(), 6);
  for (const float bad : {testing::kNan, static_cast<float>(kInfinity), -HUGE_VALF}) {
    for (const size_t place : {size_t{0}, size_t{7}, gradient.of(0).size() - 1}) {
      const float before = gradient.of(0)[place];
      gradient.of(0)[place] = bad;
      EXPECT_FALSE(std::isfinite(gradient_norm(pool, gradient)));
      gradient.of(0)[place] = before;
    }
  }
  EXPECT_TRUE(std::isfinite(gradient_norm(pool, gradient)));
}

OptimizerTable schedule(RateSchedule kind, int64_t warmup, double final_rate) {
  OptimizerTable table;
  table.learning_rate = 2.0;
  table.schedule = kind;
  table.warmup_steps = warmup;
  table.final_rate = final_rate;
  return table;
}

TEST(LearningRate, FollowsItsSchedule) {
  struct Case {
    OptimizerTable table;
    int64_t step, total;
    double rate;
  };
  const double half = 0.5 * (1.0 + std::cos(std::numbers::pi * 0.25));
  const std::vector<Case> cases = {
      {schedule(RateSchedule::constant, 0, 0.0), 1, 10, 2.0},
      {schedule(RateSchedule::constant, 0, 0.0), 99, 10, 2.0},
      {schedule(RateSchedule::constant, 4, 0.0), 1, 10, 0.5},
      {schedule(RateSchedule::constant, 4, 0.0), 4, 10, 2.0},
      {schedule(RateSchedule::constant, 4, 0.0), 5, 10, 2.0},
      {schedule(RateSchedule::linear, 0, 0.0), 1, 10, 1.8},
      {schedule(RateSchedule::linear, 0, 0.0), 10, 10, 0.0},
      {schedule(RateSchedule::linear, 0, 0.1), 10, 10, 0.2},
      {schedule(RateSchedule::linear, 0, 0.1), 50, 10, 0.2},
      {schedule(RateSchedule::linear, 4, 0.5), 2, 12, 1.0},
      {schedule(RateSchedule::linear, 4, 0.5), 8, 12, 1.5},
      {schedule(RateSchedule::cosine, 4, 0.0), 4, 12, 2.0},
      {schedule(RateSchedule::cosine, 4, 0.0), 6, 12, 2.0 * half},
      {schedule(RateSchedule::cosine, 4, 0.0), 8, 12, 1.0},
      {schedule(RateSchedule::cosine, 4, 0.5), 8, 12, 1.5},
      {schedule(RateSchedule::cosine, 4, 0.5), 12, 12, 1.0},
      {schedule(RateSchedule::cosine, 4, 0.5), 99, 12, 1.0},
      {schedule(RateSchedule::linear, 20, 0.0), 10, 5, 1.0},  // a warm-up longer than the run
      {schedule(RateSchedule::linear, 20, 0.0), 21, 5, 0.0},
  };
  for (const Case& c : cases) {
    EXPECT_NEAR(learning_rate(c.table, c.step, c.total), c.rate, 1e-12)
        << name_of(c.table.schedule) << " warm-up " << c.table.warmup_steps << " step " << c.step
        << " of " << c.total;
  }
}

TEST(LearningRate, RisesThenNeverRisesAgain) {
  for (const RateSchedule kind :
       {RateSchedule::constant, RateSchedule::linear, RateSchedule::cosine}) {
    const OptimizerTable table = schedule(kind, 7, 0.2);
    for (int64_t step = 2; step < 60; ++step) {
      const double before = learning_rate(table, step - 1, 40);
      const double now = learning_rate(table, step, 40);
      if (step <= 7) {
        EXPECT_GT(now, before);
      } else {
        EXPECT_LE(now, before + 1e-15);
      }
      EXPECT_GE(now, step <= 7 ? 0.0 : 0.4 - 1e-12);
    }
  }
}

}  // namespace
}  // namespace leeway
