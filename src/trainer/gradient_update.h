// The gradient of a step and what is done with it: the norm, one step of AdamW, the moments. Of all
// parameters, or of the part that one rank has (sharded_update.h).
//
// Threads: one call at a time per object; each uses all threads of the pool that it is given.
#pragma once

#include <optional>
#include <string>

#include "base/thread_pool.h"
#include "config/run_config.h"
#include "trainer/gradient_tree.h"
#include "trainer/state_files.h"

namespace leeway {

class GradientUpdate {
 public:
  virtual ~GradientUpdate() = default;
  // What passes add to in place; only where a step has one slot.
  virtual Parameters& in_place() = 0;
  // Adds a pass's gradient, the sum of its slots; null: the pass had no sample. The memory goes
  // back to the tree.
  virtual void add(ThreadPool& pool, std::optional<Parameters> sum, GradientTree& tree) = 0;
  virtual double norm(ThreadPool& pool) = 0;
  virtual void zero() = 0;
  virtual void step(ThreadPool& pool, const OptimizerTable& table, double rate, double scale,
                    Parameters& policy) = 0;
  virtual int64_t steps() const = 0;
  // Of all parameters. Throws Error; a `load` that throws has changed nothing.
  virtual TrainingState state(const Parameters& policy) = 0;
  virtual void load(const std::string& folder, Parameters& policy) = 0;
};

// Of all parameters.
class WholeUpdate : public GradientUpdate {
 public:
  explicit WholeUpdate(const Parameters& policy)
      : gradients_(Parameters::zeros_like(policy)), optimizer_(policy) {}

  Parameters& in_place() override { return gradients_; }
  void add(ThreadPool& pool, std::optional<Parameters> sum, GradientTree& tree) override;
  double norm(ThreadPool& pool) override { return gradient_norm(pool, gradients_); }
  void zero() override;
  void step(ThreadPool& pool, const OptimizerTable& table, double rate, double scale,
            Parameters& policy) override {
    optimizer_.step(pool, table, rate, scale, gradients_, policy);
  }
  int64_t steps() const override { return optimizer_.steps(); }
  TrainingState state(const Parameters& policy) override { return {policy, optimizer_}; }
  void load(const std::string& folder, Parameters& policy) override {
    load_state(folder, policy, optimizer_);
  }

 private:
  Parameters gradients_;  // the sum of all passes since the last step
  bool has_pass_ = false;
  AdamW optimizer_;
};

}  // namespace leeway
