// AdamW over all parameters, with the norm of the gradient and the learning rate schedule.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/thread_pool.h"
#include "config/run_config.h"
#include "model/parameters.h"

namespace leeway {

// The learning rate of optimizer step `step` (1, 2, ..) of `total`: rises linearly over
// `warmup_steps`, then stays (constant) or falls to final_rate * learning_rate at step `total`,
// linearly or along half a cosine. Beyond `total` it keeps its final value.
double learning_rate(const OptimizerTable& table, int64_t step, int64_t total);

// The Euclidean norm of all gradients, summed in double in a fixed order, whatever the threads. Not
// finite if any number is not.
double gradient_norm(ThreadPool& pool, const Parameters& gradients);

// The same in two parts, for gradients that lie apart: the squares' sums of blocks of kNormBlock
// numbers, and the norm of all blocks in order.
inline constexpr size_t kNormBlock = size_t{1} << 14;
std::vector<double> squares_of_blocks(ThreadPool& pool, std::span<const float> gradients);
double norm_of_blocks(std::span<const double> squares);

// Decoupled weight decay, on matrices only (Loshchilov and Hutter), with bias correction:
//   p <- p (1 - rate * weight_decay);   m <- b1 m + (1 - b1) g;   v <- b2 v + (1 - b2) g^2
//   p <- p - rate * (m / (1 - b1^n)) / (sqrt(v / (1 - b2^n)) + epsilon)
class AdamW {
 public:
  explicit AdamW(const ModelConfig& config);
  // For what is trained of `parameters`: an adapter has moments of its own matrices alone.
  explicit AdamW(const Parameters& parameters);

  // One step with gradients times `scale`. Does not change the gradients.
  void step(ThreadPool& pool, const OptimizerTable& table, double rate, double scale,
            const Parameters& gradients, Parameters& parameters);

  // The same for the part of the parameters' buffer from `first` on: g, m and v are its gradients
  // and moments. `steps`: with this one.
  static void step_part(ThreadPool& pool, const OptimizerTable& table, double rate, double scale,
                        int64_t steps, size_t first, std::span<const float> g, std::span<float> m,
                        std::span<float> v, Parameters& parameters);

  int64_t steps() const { return steps_; }
  // For saving and loading.
  Parameters& first_moment() { return m_; }
  Parameters& second_moment() { return v_; }
  const Parameters& first_moment() const { return m_; }
  const Parameters& second_moment() const { return v_; }
  void set_steps(int64_t steps) { steps_ = steps; }

 private:
  Parameters m_, v_;
  int64_t steps_ = 0;
};

}  // namespace leeway
