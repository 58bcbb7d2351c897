#include "run/policy_evaluation.h"

#include <fmt/format.h>

#include <chrono>
#include <cmath>

#include "orchestrator/steady_clock.h"
#include "run/engine_sampler.h"
#include "run/output.h"

namespace leeway {

EvaluationResult evaluate_policy(const RunSetup& setup, const PolicySnapshot& weights,
                                 const EvalTable& table, int threads, bool quiet,
                                 const std::function<bool()>& should_stop) {
  const auto begin = std::chrono::steady_clock::now();
  EngineOptions engine = setup.engine_options(threads);
  engine.precision = Precision::float32;
  engine.threads = threads;
  EngineSampler sampler(weights, engine);
  SteadyClock clock;
  Progress progress("eval", "rollouts");
  const OrchestratorTable& policy = setup.config.run.orchestrator;
  EvaluationOptions options;
  options.prompts = table.prompts;
  options.seed = static_cast<uint64_t>(setup.config.run.seed) * 7919;
  options.max_attempts = policy.max_error_reschedule_attempts;
  options.retry_backoff = policy.retry_backoff;
  options.most_failures_in_a_row = policy.zero_progress_batches *
                                   static_cast<double>(policy.prompts_per_batch) *
                                   static_cast<double>(policy.group_size);
  options.should_stop = should_stop;
  EvaluationResult result;
  const auto run = [&](float temperature, int64_t samples) {
    RolloutDriver driver(*setup.conversation, sampler, clock, setup.rollout_settings(temperature));
    options.samples = samples;
    const HeldOutResult sampled = sample_held_out(*setup.environments, driver, clock, options,
                                                  [&](size_t done, size_t total) {
                                                    if (!quiet) progress.update(done, total);
                                                  });
    result.stopped = sampled.stopped;
    if (sampled.stopped) return;
    result.rollouts += sampled.rollouts;
    result.failed += sampled.failed;
    if (sampled.failed > 0) result.last_failure = sampled.last_failure;
    for (const PromptResult& prompt : sampled.prompts) result.tokens += prompt.tokens;
    const MetricList metrics =
        evaluation_metrics(sampled.prompts, setup.environment_ids, temperature == 0.0f);
    result.metrics.insert(result.metrics.end(), metrics.begin(), metrics.end());
  };
  run(static_cast<float>(setup.config.run.rollout.temperature), table.samples);
  if (table.greedy && !result.stopped) run(0.0f, 1);
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

}  // namespace leeway
