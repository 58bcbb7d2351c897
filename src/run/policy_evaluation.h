// Evaluation of weights on a run's held-out prompts.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "orchestrator/evaluation.h"
#include "run/engine_sampler.h"
#include "run/run_setup.h"
#include "run/shared_sampler.h"

namespace leeway {

struct EvaluationResult {
  Metrics metrics;  // eval/..: docs/runs.md
  int64_t tokens = 0;
  double seconds = 0.0;
  int64_t rollouts = 0, failed = 0;  // greedy ones among them; failed: after all retries
  std::string last_failure;
  bool stopped = false;  // by should_stop; the metrics are empty then
  double metric(const std::string& name) const { return metric_of(metrics, name); }
  bool nothing_completed() const { return !stopped && failed == rollouts; }
};

// Callbacks of an evaluation; each may be empty, and is called repeatedly on the evaluating
// thread.
struct EvaluationEvents {
  std::function<bool()> should_stop;
  std::function<void(size_t done, size_t total)> on_rollouts;
  // The first attempt of each environment that fails, as a line.
  std::function<void(const std::string& line)> on_first_failure;
};

// Evaluates one set of weights after the other, in the chat format without the flags of training.
//
// In process it has one engine, which is made for the first weights and uses all cores: packed
// weights and the KV cache are allocated once per run, except on a GPU for a policy so large that
// training between evaluations needs the memory (an adapter is not). It samples in float32, on a
// GPU that trains in bf16 in that, whatever precision rollouts use: the policy is evaluated, not
// its quantised copy. Servers sample as they do for training; so do the engines of a run's ranks,
// which are servers here. Used by one thread at a time.
class PolicyEvaluator {
 public:
  // `setup` must outlive this and have environments.
  explicit PolicyEvaluator(const RunSetup& setup) : setup_(setup) {}

  // From here on the servers of the run sample, which get the weights of an evaluation if they have
  // others; null: an engine in this process. `servers` must outlive its use, on its thread alone.
  void sample_with(SharedSampler* servers);
  bool has_servers() const { return servers_ != nullptr; }
  // Of the weights that the servers have.
  PolicyVersion served_version() const { return servers_->version(); }

  // Samples `table.prompts` held-out prompts. What fails is tried again as [orchestrator] says for
  // training; what stays failed is counted. Throws Error if there is no held-out prompt.
  EvaluationResult evaluate(std::shared_ptr<const PolicySnapshot> weights, const EvalTable& table,
                            const EvaluationEvents& events = {});

 private:
  // What samples, with these weights.
  Sampler& loaded(std::shared_ptr<const PolicySnapshot> weights);

  const RunSetup& setup_;
  std::unique_ptr<EngineSampler> engine_;
  SharedSampler* servers_ = nullptr;
};

// "5 of 248 rollouts failed, the last: ..", "all 248 rollouts failed, ..", or nothing.
std::string failures_text(const EvaluationResult& result);

// The result of an evaluation as a line of text.
std::string evaluation_line(int64_t step, const EvaluationResult& result);

// Reward, pass@k and greedy reward of each environment with their intervals, as `leeway eval`
// prints them.
std::string evaluation_table(const EvaluationResult& result,
                             const std::vector<std::string>& environment_ids);

}  // namespace leeway
