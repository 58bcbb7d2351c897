#include "cli/training_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <thread>

#include "base/files.h"
#include "cli/engine_sampler.h"
#include "cli/explain_text.h"
#include "cli/interrupt.h"
#include "cli/policy_evaluation.h"
#include "cli/run_progress.h"
#include "cli/sft_phase.h"
#include "cli/trainer_learner.h"
#include "leeway/error.h"
#include "orchestrator/loop.h"
#include "report/run_folder.h"
#include "report/run_page.h"

namespace leeway {
namespace {

class SteadyClock : public Clock {
 public:
  double now() const override {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }
};

double metric(const MetricList& metrics, const std::string& name) {
  for (const auto& [key, value] : metrics) {
    if (key == name) return value;
  }
  return std::nan("");
}

// Sampling on the calling thread and learning beside it share the cores by plan: where they take
// turns each has all of them. The learner has more to do per token, so it may use every core; the
// sampler's own thread then takes the one it needs.
struct ThreadPlan {
  int sampler, trainer;
};
ThreadPlan plan_threads(const RunConfig& run) {
  const int cores = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  const bool overlap = run.orchestrator.max_off_policy_steps > 0;
  return {overlap ? std::max(1, cores / 2) : cores,
          run.trainer.threads > 0 ? static_cast<int>(run.trainer.threads) : cores};
}

// What cannot be trained on: tokens of another distribution than the trainer's, or no draw at all.
void refuse_sampling(const RolloutTable& table) {
  if (table.temperature == 0.0) {
    throw Error(
        "rollout.temperature = 0: greedy rollouts of a prompt are all the same, so that there is "
        "nothing to learn; give a temperature above 0");
  }
  const char* key = table.top_k > 0     ? "top_k"
                    : table.top_p < 1.0 ? "top_p"
                    : table.min_p > 0.0 ? "min_p"
                                        : nullptr;
  if (key == nullptr) return;
  throw Error(fmt::format(
      "rollout.{}: a training run with truncated sampling is refused: its tokens come from another "
      "distribution than the one the trainer computes, and every ratio would be wrong. Leave it "
      "out; use rollout.temperature",
      key));
}

class Run {
 public:
  Run(const RunSetup& setup, const Catalog& catalog)
      : setup_(setup),
        run_(setup.config.run),
        catalog_(catalog),
        files_(setup.config, explain_text(setup.config.loss_spec)),
        progress_(&files_) {}

  RunSummary run() {
    const double begin = clock_.now();
    summary_.folder = files_.folder();
    summary_.max_steps = run_.trainer.max_steps;
    progress_.note(fmt::format("run folder {}", files_.folder()));
    Parameters weights = setup_.weights;
    if (run_.sft.enabled) {
      SftResult sft = run_sft(setup_, catalog_, files_, progress_, interrupt_);
      summary_.sft_steps = sft.steps;
      summary_.sft_seconds = sft.seconds;
      weights = std::move(sft.weights);
      if (!sft.failure.empty()) give_up(sft.failure);
      if (sft.stopped) summary_.end = RunSummary::End::stopped;
    }
    if (summary_.end == RunSummary::End::finished)
      train(std::move(weights));
    else
      save(weights, 0);
    summary_.seconds = clock_.now() - begin;
    write_report();
    return summary_;
  }

 private:
  void give_up(const std::string& reason) {
    summary_.end = RunSummary::End::gave_up;
    summary_.reason = reason;
  }

  void say_what_is_inert() {
    const bool on_policy = run_.orchestrator.max_off_policy_steps == 0 &&
                           run_.trainer.numerics == "exact" && run_.rollout.precision == "float32";
    for (const std::string& part : inert_parts(setup_.config.loss_spec, run_.trainer, on_policy)) {
      progress_.note("note: " + part);
    }
  }

  void train(Parameters weights) {
    const ThreadPlan threads = plan_threads(run_);
    TrainerTable table = run_.trainer;
    table.threads = threads.trainer;
    evaluate(0, weights, 0);
    say_what_is_inert();
    latest_ = std::make_shared<const Parameters>(weights);
    EngineSampler sampler(weights, setup_.engine_options(threads.sampler));
    RolloutDriver driver(*setup_.conversation, sampler,
                         setup_.rollout_settings(static_cast<float>(run_.rollout.temperature)));
    RolloutScheduler scheduler(run_.orchestrator, static_cast<uint64_t>(run_.seed), table.max_steps,
                               *setup_.environments, driver, sampler);
    Trainer trainer(std::move(weights), setup_.config.loss_spec, table);
    LoopOptions options;
    options.max_steps = table.max_steps;
    options.batch.advantage = {parse_advantage_kind(run_.orchestrator.advantage),
                               run_.orchestrator.length_penalty};
    options.batch.filter_zero_advantages = run_.orchestrator.filter_zero_advantages;
    options.batch.temperature = static_cast<float>(run_.rollout.temperature);
    options.most_drops_in_a_row = 10 * run_.orchestrator.prompts_per_batch;
    LoopEvents events;
    events.on_step = [&](const StepRecord& record) { on_step(record, threads.sampler); };
    events.should_stop = [&] { return interrupt_.asked(); };
    const double begin = clock_.now(), evaluated = summary_.eval_seconds;
    progress_.begin();
    LoopResult result;
    {
      TrainerLearner learner(trainer);
      result = run_loop(scheduler, learner, clock_, setup_.environment_ids, options, events);
    }
    summary_.rl_seconds = clock_.now() - begin - (summary_.eval_seconds - evaluated);
    summary_.steps = result.steps;
    summary_.rollouts = scheduler.totals().completed;
    summary_.sampled_tokens = scheduler.totals().sampled_tokens;
    summary_.sampler_busy = sampling_ / std::max(summary_.rl_seconds, 1e-9);
    summary_.trainer_busy = learning_ / std::max(summary_.rl_seconds, 1e-9);
    if (result.end == LoopResult::End::gave_up) give_up(result.reason);
    if (result.end == LoopResult::End::stopped) summary_.end = RunSummary::End::stopped;
    if (result.steps > 0 && last_evaluated_ != result.steps &&
        result.end == LoopResult::End::finished) {
      evaluate(result.steps, *latest_, 0);
    }
    save(*latest_, result.steps);
  }

  void on_step(const StepRecord& record, int threads) {
    latest_ = std::static_pointer_cast<const Parameters>(record.learned.weights);
    files_.write_step(record);
    const OutputTable& output = run_.output;
    if (output.rollouts_every > 0 &&
        (record.step % output.rollouts_every == 0 || record.step == 1)) {
      files_.write_rollouts(record, setup_, setup_.config.loss_spec, output.rollouts_groups);
    }
    const double step_seconds = metric(record.metrics, "time/step");
    sampling_ += metric(record.metrics, "perf/sampler_busy") * step_seconds;
    learning_ += record.learned.busy_seconds;
    summary_.trained_tokens =
        static_cast<int64_t>(metric(record.metrics, "progress/trained_tokens"));
    progress_.step(
        record.step, run_.trainer.max_steps,
        fmt::format("reward {:.3f}  mismatch_kl {:.2g}  masked {:.2f}%  lag {:.2g}  {:.0f}k "
                    "tokens/s",
                    metric(record.metrics, "reward/all/mean"),
                    metric(record.metrics, "mismatch_kl/all/mean"),
                    100.0 * metric(record.metrics, "is_masked"),
                    metric(record.metrics, "off_policy_level/all/mean"),
                    (metric(record.metrics, "batch/tokens") +
                     static_cast<double>(record.batch.sampled_tokens)) /
                        step_seconds / 1000.0));
    if (run_.eval.every > 0 && record.step % run_.eval.every == 0) {
      const bool last = record.step == run_.trainer.max_steps;
      evaluate(record.step, *latest_, last ? 0 : threads);
    }
    if (output.weights_every > 0 && record.step % output.weights_every == 0) {
      save(*latest_, record.step);
    }
  }

  void evaluate(int64_t step, const Parameters& weights, int threads) {
    const EvaluationResult result = evaluate_policy(setup_, weights, run_.eval, threads, false);
    last_evaluated_ = step;
    summary_.eval_seconds += result.seconds;
    (step == 0 ? summary_.before : summary_.after) = result.metrics;
    files_.write_eval(step, result.metrics);
    progress_.note(fmt::format(
        "eval at step {}: reward {:.3f} [{:.3f}, {:.3f}] on {:.0f} held-out prompts{}", step,
        result.metric("eval/all/reward/mean"), result.metric("eval/all/reward/low"),
        result.metric("eval/all/reward/high"), result.metric("eval/all/prompts"),
        run_.eval.greedy ? fmt::format(", greedy {:.3f}", result.metric("eval/all/greedy/mean"))
                         : ""));
  }

  void save(const Parameters& weights, int64_t step) {
    summary_.weights = files_.path(fmt::format("weights/step_{}", step));
    save_parameters(weights, summary_.weights);
    // A folder that loads anywhere has its tokenizer beside the weights.
    if (run_.model.path.empty()) return;
    for (const char* name : {"tokenizer.json", "tokenizer_config.json", "generation_config.json",
                             "special_tokens_map.json", "vocab.json", "merges.txt"}) {
      const std::filesystem::path from = std::filesystem::path(run_.model.path) / name;
      std::error_code error;
      if (!std::filesystem::exists(from, error)) continue;
      write_file_atomically(summary_.weights + "/" + name, read_file(from.string()));
    }
  }

  void write_report() {
    const std::string folders[] = {files_.folder()};
    write_file_atomically(files_.path("report.html"), run_page(run_folders_json(folders)));
  }

  const RunSetup& setup_;
  const RunConfig& run_;
  const Catalog& catalog_;
  SteadyClock clock_;
  RunFiles files_;
  RunProgress progress_;
  Interrupt interrupt_;
  RunSummary summary_;
  std::shared_ptr<const Parameters> latest_;
  int64_t last_evaluated_ = -1;
  double sampling_ = 0.0, learning_ = 0.0;
};

}  // namespace

RunSummary run_training(const RunSetup& setup, const Catalog& catalog) {
  refuse_sampling(setup.config.run.rollout);
  return Run(setup, catalog).run();
}

}  // namespace leeway
