#include "trainer/optimizer.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "leeway/error.h"

namespace leeway {
namespace {

constexpr size_t kBlock = kNormBlock;  // numbers that a thread processes at a time

// Calls body(block, first, count) for blocks of a span of `size` numbers.
template <class Body>
void for_blocks(ThreadPool& pool, size_t size, Body&& body) {
  pool.run((size + kBlock - 1) / kBlock, [&](size_t block) {
    const size_t first = block * kBlock;
    body(block, first, std::min(kBlock, size - first));
  });
}

}  // namespace

double learning_rate(const OptimizerTable& table, int64_t step, int64_t total) {
  if (step <= table.warmup_steps) {
    return table.learning_rate * static_cast<double>(step) /
           static_cast<double>(table.warmup_steps);
  }
  if (table.schedule == RateSchedule::constant) return table.learning_rate;
  const double length = static_cast<double>(std::max<int64_t>(1, total - table.warmup_steps));
  const double way = std::min(1.0, static_cast<double>(step - table.warmup_steps) / length);
  const double left = table.schedule == RateSchedule::linear
                          ? 1.0 - way
                          : 0.5 * (1.0 + std::cos(std::numbers::pi * way));
  return table.learning_rate * (table.final_rate + (1.0 - table.final_rate) * left);
}

std::vector<double> squares_of_blocks(ThreadPool& pool, std::span<const float> g) {
  std::vector<double> sums((g.size() + kBlock - 1) / kBlock);
  for_blocks(pool, g.size(), [&](size_t block, size_t first, size_t count) {
    double lanes[8] = {};
    size_t i = 0;
    for (; i + 8 <= count; i += 8) {
      for (size_t lane = 0; lane < 8; ++lane) {
        const double value = g[first + i + lane];
        lanes[lane] += value * value;
      }
    }
    for (; i < count; ++i) lanes[0] += static_cast<double>(g[first + i]) * g[first + i];
    double sum = 0.0;
    for (double lane : lanes) sum += lane;
    sums[block] = sum;
  });
  return sums;
}

double norm_of_blocks(std::span<const double> squares) {
  double total = 0.0;
  for (double sum : squares) total += sum;
  return std::sqrt(total);
}

double gradient_norm(ThreadPool& pool, const Parameters& gradients) {
  return norm_of_blocks(squares_of_blocks(pool, gradients.flat()));
}

AdamW::AdamW(const ModelConfig& config) : m_(config), v_(config) {}
AdamW::AdamW(const Parameters& parameters)
    : m_(Parameters::zeros_like(parameters)), v_(Parameters::zeros_like(parameters)) {}

void AdamW::step(ThreadPool& pool, const OptimizerTable& table, double rate, double scale,
                 const Parameters& gradients, Parameters& parameters) {
  ++steps_;
  step_part(pool, table, rate, scale, steps_, 0, gradients.flat(), m_.flat(), v_.flat(),
            parameters);
}

void AdamW::step_part(ThreadPool& pool, const OptimizerTable& table, double rate, double scale,
                      int64_t steps, size_t first, std::span<const float> g, std::span<float> m,
                      std::span<float> v, Parameters& parameters) {
  const double n = static_cast<double>(steps);
  const float b1 = static_cast<float>(table.beta1), b2 = static_cast<float>(table.beta2);
  const float step_size = static_cast<float>(rate / (1.0 - std::pow(table.beta1, n)));
  const float root = static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(table.beta2, n)));
  const float epsilon = static_cast<float>(table.epsilon), factor = static_cast<float>(scale);
  const size_t last = first + g.size();
  for (size_t index = 0; index < parameters.table().size(); ++index) {
    const auto role = parameters.table()[index].role;
    const bool matrix = role != ParameterInfo::Role::norm && role != ParameterInfo::Role::bias;
    const float keep = matrix ? static_cast<float>(1.0 - rate * table.weight_decay) : 1.0f;
    const std::span<float> all = parameters.of(index);
    const auto place = static_cast<size_t>(all.data() - parameters.flat().data());
    const size_t begin = std::max(place, first), end = std::min(place + all.size(), last);
    if (begin >= end) continue;
    for_blocks(pool, end - begin, [&](size_t, size_t offset, size_t count) {
      const size_t at = begin + offset;
      float* __restrict pp = parameters.flat().data() + at;
      float* __restrict mm = m.data() + (at - first);
      float* __restrict vv = v.data() + (at - first);
      const float* __restrict gg = g.data() + (at - first);
      for (size_t i = 0; i < count; ++i) {
        const float gradient = gg[i] * factor;
        mm[i] = b1 * mm[i] + (1.0f - b1) * gradient;
        vv[i] = b2 * vv[i] + (1.0f - b2) * gradient * gradient;
        pp[i] = pp[i] * keep - step_size * mm[i] / (std::sqrt(vv[i]) * root + epsilon);
      }
    });
  }
}

}  // namespace leeway
