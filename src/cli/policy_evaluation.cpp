#include "cli/policy_evaluation.h"

#include <chrono>
#include <cmath>

#include "cli/engine_sampler.h"
#include "cli/output.h"
#include "orchestrator/steady_clock.h"

namespace leeway {

EvaluationResult evaluate_policy(const RunSetup& setup, const Parameters& weights,
                                 const EvalTable& table, int threads, bool quiet) {
  const auto begin = std::chrono::steady_clock::now();
  EngineOptions engine = setup.engine_options(threads);
  engine.precision = Precision::float32;
  engine.threads = threads;
  EngineSampler sampler(weights, 0, engine);
  SteadyClock clock;
  Progress progress("eval", "rollouts");
  EvaluationResult result;
  const auto run = [&](float temperature, int64_t samples) {
    RolloutDriver driver(*setup.conversation, sampler, clock, setup.rollout_settings(temperature));
    EvaluationOptions options;
    options.prompts = table.prompts;
    options.samples = samples;
    options.seed = static_cast<uint64_t>(setup.config.run.seed) * 7919;
    const std::vector<PromptResult> prompts =
        sample_held_out(*setup.environments, driver, options, [&](size_t done, size_t total) {
          if (!quiet) progress.update(done, total);
        });
    for (const PromptResult& prompt : prompts) result.tokens += prompt.tokens;
    const MetricList metrics =
        evaluation_metrics(prompts, setup.environment_ids, temperature == 0.0f);
    result.metrics.insert(result.metrics.end(), metrics.begin(), metrics.end());
  };
  run(static_cast<float>(setup.config.run.rollout.temperature), table.samples);
  if (table.greedy) run(0.0f, 1);
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  result.metrics.emplace_back("time/eval", result.seconds);
  return result;
}

}  // namespace leeway
