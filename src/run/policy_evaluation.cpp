#include "run/policy_evaluation.h"

#include <fmt/format.h>

#include <chrono>
#include <cmath>
#include <set>
#include <utility>

#include "base/text_table.h"
#include "orchestrator/steady_clock.h"
#include "run/devices.h"
#include "run/failure_lines.h"

namespace leeway {

void PolicyEvaluator::sample_with(SharedSampler* servers) {
  servers_ = servers;
  engine_.reset();
}

Sampler& PolicyEvaluator::loaded(std::shared_ptr<const PolicySnapshot> weights) {
  const PolicyVersion version = weights->version();
  if (servers_ != nullptr) {
    Sampler& servers = servers_->evaluation();
    if (servers_->version() != version) servers.update_weights(std::move(weights), version);
    return servers;
  }
  if (engine_) {
    engine_->update_weights(std::move(weights), version);
    return *engine_;
  }
  EngineOptions options = setup_.engine_options(0);
  options.precision = Precision::float32;
  if (rollout_precision(setup_.config.run) == Precision::fp8) {
    options.backend = sampling_backend(setup_.config.run.model.device, Precision::bf16);
  }
  options.threads = 0;
  engine_ = std::make_unique<EngineSampler>(*weights, options);
  return *engine_;
}

EvaluationResult PolicyEvaluator::evaluate(std::shared_ptr<const PolicySnapshot> weights,
                                           const EvalTable& table, const EvaluationEvents& events) {
  const auto begin = std::chrono::steady_clock::now();
  struct LetGo {  // also if sampling fails
    PolicyEvaluator& evaluator;
    ~LetGo() {
      if (!evaluator.setup_.keeps_evaluation_engine()) evaluator.engine_.reset();
    }
  } const let_go{*this};
  Sampler& sampler = loaded(std::move(weights));
  SteadyClock clock;
  const RunConfig& run = setup_.config.run;
  const OrchestratorTable& policy = run.orchestrator;
  EvaluationOptions options;
  options.prompts = table.prompts;
  options.seed = static_cast<uint64_t>(run.seed) * 7919;
  options.max_attempts = policy.max_error_reschedule_attempts;
  options.retry_backoff = policy.retry_backoff;
  options.most_failures_in_a_row = policy.zero_progress_batches *
                                   static_cast<double>(policy.prompts_per_batch) *
                                   static_cast<double>(policy.group_size);
  options.should_stop = events.should_stop;
  std::set<size_t> told;
  options.on_failure = [&](size_t environment, uint64_t example, FailureKind kind,
                           const std::string& message) {
    if (!events.on_first_failure || !told.insert(environment).second) return;
    events.on_first_failure("eval: " + failure_line(setup_.environment_ids[environment],
                                                    {kind, environment, example, message}));
  };
  EvaluationResult result;
  const auto sample = [&](float temperature, int64_t samples) {
    RolloutDriver driver(*setup_.evaluation_conversation, sampler, clock,
                         setup_.rollout_settings(temperature));
    options.samples = samples;
    const HeldOutResult sampled = sample_held_out(*setup_.environments, driver, clock, options,
                                                  [&](size_t done, size_t total) {
                                                    if (events.on_rollouts)
                                                      events.on_rollouts(done, total);
                                                  });
    result.stopped = sampled.stopped;
    if (sampled.stopped) return;
    result.rollouts += sampled.rollouts;
    result.failed += sampled.failed;
    if (sampled.failed > 0) result.last_failure = sampled.last_failure;
    for (const PromptResult& prompt : sampled.prompts) result.tokens += prompt.tokens;
    const Metrics metrics =
        evaluation_metrics(sampled.prompts, setup_.environment_ids, temperature == 0.0f);
    result.metrics.insert(result.metrics.end(), metrics.begin(), metrics.end());
  };
  sample(static_cast<float>(run.rollout.temperature), table.samples);
  if (table.greedy && !result.stopped) sample(0.0f, 1);
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  if (result.stopped) {
    result.metrics.clear();
    return result;
  }
  result.metrics.emplace_back("time/eval", result.seconds);
  return result;
}

std::string failures_text(const EvaluationResult& result) {
  if (result.failed == 0) return "";
  const std::string count = result.failed == result.rollouts
                                ? fmt::format("all {}", result.rollouts)
                                : fmt::format("{} of {}", result.failed, result.rollouts);
  return fmt::format("{} rollouts failed, the last: {}", count, result.last_failure);
}

std::string evaluation_line(int64_t step, const EvaluationResult& result) {
  if (result.stopped) return fmt::format("eval at step {}: stopped before its end", step);
  const std::string failures = failures_text(result);
  if (std::isnan(result.metric("eval/all/reward/mean"))) {
    return fmt::format("eval at step {}: nothing completed: {}", step, failures);
  }
  const double greedy = result.metric("eval/all/greedy/mean");
  return fmt::format(
      "eval at step {}: reward {:.3f} [{:.3f}, {:.3f}] on {:.0f} held-out prompts{}{}{}", step,
      result.metric("eval/all/reward/mean"), result.metric("eval/all/reward/low"),
      result.metric("eval/all/reward/high"), result.metric("eval/all/prompts"),
      std::isnan(greedy) ? "" : fmt::format(", greedy {:.3f}", greedy),
      failures.empty() ? "" : "; ", failures);
}

std::string evaluation_table(const EvaluationResult& result, const std::vector<std::string>& ids) {
  std::vector<std::vector<std::string>> rows;
  const auto add = [&](const std::string& id) {
    const auto row = [&](const std::string& name, const std::string& mean) {
      const std::string path = "eval/" + id + "/" + name;
      const double value = result.metric(path + mean);
      if (std::isnan(value)) return;
      const double low = result.metric(path + "/low"), high = result.metric(path + "/high");
      rows.push_back({id, name, fmt::format("{:.4f}", value),
                      std::isnan(low) ? "" : fmt::format("{:.4f} .. {:.4f}", low, high)});
    };
    row("reward", "/mean");
    for (int64_t k = 1; k <= (int64_t{1} << 20); k *= 2) row(fmt::format("pass@{}", k), "");
    row("greedy", "/mean");
  };
  if (ids.size() > 1) add("all");
  for (const std::string& id : ids) add(id);
  return format_table({"environment", "metric", "mean", "95 % interval"}, rows) +
         "\npass@k  probability that at least one of k answers to a prompt is right: its first "
         "reward "
         "is 1 or more\n";
}

}  // namespace leeway
