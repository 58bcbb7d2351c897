#include "cli/training_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <optional>
#include <thread>

#include "base/crc32c.h"
#include "base/files.h"
#include "base/json.h"
#include "cli/checkpoints.h"
#include "cli/devices.h"
#include "cli/engine_sampler.h"
#include "cli/explain_text.h"
#include "cli/interrupt.h"
#include "cli/policy_card.h"
#include "cli/policy_evaluation.h"
#include "cli/run_end.h"
#include "cli/run_progress.h"
#include "cli/sft_phase.h"
#include "cli/trainer_learner.h"
#include "config/given.h"
#include "leeway/error.h"
#include "orchestrator/loop.h"
#include "orchestrator/schedule_state_json.h"
#include "orchestrator/steady_clock.h"
#include "report/run_folder.h"
#include "report/run_page.h"

namespace leeway {
namespace {

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

// What a checkpoint holds beside the trainer and the scheduler.
struct RunState {
  int64_t trained_tokens = 0, sft_steps = 0;
  double sft_seconds = 0.0;
  uint32_t initial_checksum = 0;  // of the policy at step 0, where the loss needs it
  int64_t course_begin = 0;       // optimizer steps before the rate's course began
  MetricList before;              // the evaluation before RL
};

uint32_t checksum(const Parameters& parameters) {
  std::string sums;
  for (size_t i = 0; i < parameters.table().size(); ++i) {
    const auto values = parameters.of(i);
    sums += fmt::format("{} ", crc32c({reinterpret_cast<const char*>(values.data()),
                                       values.size() * sizeof(float)}));
  }
  return crc32c(sums);
}

void write_state(const std::string& folder, const RunState& state) {
  JsonWriter json;
  json.begin_object().key("trained_tokens").value(static_cast<double>(state.trained_tokens));
  json.key("sft_steps").value(static_cast<double>(state.sft_steps));
  json.key("sft_seconds").value(state.sft_seconds);
  json.key("initial_checksum").value(static_cast<double>(state.initial_checksum));
  json.key("course_begin").value(static_cast<double>(state.course_begin));
  json.key("before").begin_object();
  for (const auto& [name, value] : state.before) json.key(name).value(value);
  write_file_atomically(folder + "/run.json", json.end_object().end_object().text() + "\n");
}

RunState read_state(const std::string& folder) {
  const std::string name = folder + "/run.json";
  const auto json = parse_json(name, read_file(name));
  RunState state;
  for (const char* key :
       {"trained_tokens", "sft_steps", "sft_seconds", "initial_checksum", "before"}) {
    if (!json.IsObject() || !json.HasMember(key)) throw Error(name + ": has no " + key);
  }
  state.trained_tokens = static_cast<int64_t>(json["trained_tokens"].GetDouble());
  state.sft_steps = static_cast<int64_t>(json["sft_steps"].GetDouble());
  state.sft_seconds = json["sft_seconds"].GetDouble();
  state.initial_checksum = static_cast<uint32_t>(json["initial_checksum"].GetDouble());
  // Absent in older ones.
  if (json.HasMember("course_begin") && json["course_begin"].IsNumber()) {
    state.course_begin = static_cast<int64_t>(json["course_begin"].GetDouble());
  }
  for (const auto& member : json["before"].GetObject()) {
    state.before.emplace_back(member.name.GetString(),
                              member.value.IsNumber() ? member.value.GetDouble() : std::nan(""));
  }
  return state;
}

void set_model_path(Config& config, const std::string& path) {
  config.run.model.path = path;
  for (EffectiveValue& value : config.effective) {
    if (value.key == "model.path") value.value = toml_string(path);
  }
}

const char* name_of(RunSummary::End end) {
  switch (end) {
    case RunSummary::End::finished: return "finished";
    case RunSummary::End::stopped: return "stopped";
    case RunSummary::End::gave_up: return "gave_up";
  }
  return "";
}

class Run {
 public:
  Run(const RunSetup& setup, const Catalog& catalog, RunFiles files, const NewRun& start)
      : setup_(setup),
        run_(setup.config.run),
        catalog_(catalog),
        start_(start),
        files_(std::move(files)),
        checkpoints_(files_.folder(), run_.checkpoint, files_.identity()),
        progress_(&files_) {
    for (const std::string& note : start_.notes) progress_.note(note);
  }
  Run(const RunSetup& setup, const Catalog& catalog, RunFiles files, const Checkpoint& from,
      const std::vector<std::string>& notes)
      : Run(setup, catalog, std::move(files), NewRun{.notes = notes}) {
    (from.phase == Phase::sft ? sft_from_ : from_) = from;
    progress_.note(fmt::format("resumed from {}", from.name()));
    if (!files_.moved().empty()) progress_.note(files_.moved());
  }

  RunSummary run() {
    const double begin = clock_.now();
    summary_.folder = files_.folder();
    summary_.max_steps = run_.trainer.max_steps;
    try {
      progress_.note(fmt::format("run folder {}", files_.folder()));
      from_ ? go_on() : begin_run();
    } catch (const Error& error) {
      // A file that cannot be written, most often: the disk is full.
      give_up(error.what());
    }
    try {
      if (latest_) save_weights(steps_);
    } catch (const Error& error) {
      summary_.weights.clear();
      give_up(error.what());
    }
    log_environments();
    summary_.sft_steps = state_.sft_steps;
    summary_.sft_seconds = state_.sft_seconds;
    summary_.before = state_.before;
    summary_.steps = steps_;
    summary_.seconds = clock_.now() - begin;
    try {
      files_.write_report();
      write_end(files_.folder(), {.end = name_of(summary_.end),
                                  .reason = summary_.reason,
                                  .steps = steps_,
                                  .max_steps = run_.trainer.max_steps,
                                  .sft_steps = state_.sft_steps,
                                  .sft_seconds = state_.sft_seconds,
                                  .totals = summary_.totals});
    } catch (const Error& error) {
      give_up(error.what());
    }
    return summary_;
  }

 private:
  // The first reason is the one that counts.
  void give_up(const std::string& reason) {
    if (summary_.end != RunSummary::End::gave_up) summary_.reason = reason;
    summary_.end = RunSummary::End::gave_up;
  }

  void go_on() {
    state_ = read_state(from_->folder);
    if (auto evaluation = last_evaluation(files_.folder())) {
      last_evaluated_ = evaluation->first;
      if (last_evaluated_ > 0) summary_.after = std::move(evaluation->second);
    }
    train(load_parameters(from_->folder));
  }

  void begin_run() {
    Parameters weights = setup_.weights;
    if (run_.sft.enabled) {
      SftResult sft = run_sft({setup_, catalog_, files_, progress_, interrupt_, checkpoints_},
                              sft_from_ ? &*sft_from_ : nullptr);
      state_.sft_steps = sft.state.steps;
      state_.sft_seconds = sft.state.seconds;
      weights = std::move(sft.weights);
      if (!sft.failure.empty()) give_up(sft.failure);
      if (sft.stopped) summary_.end = RunSummary::End::stopped;
    }
    if (summary_.end == RunSummary::End::finished) {
      train(std::move(weights));
    } else {
      latest_ = std::make_shared<const Parameters>(std::move(weights));
    }
  }

  void say_what_is_inert() {
    // On the CPU alone is it one piece of code that samples and trains.
    const bool on_policy = run_.orchestrator.max_off_policy_steps == 0 &&
                           run_.model.device == "cpu" && run_.trainer.numerics == "exact" &&
                           run_.rollout.precision == "float32";
    for (const std::string& part : inert_parts(setup_.config.loss_spec, run_.trainer, on_policy)) {
      progress_.note("note: " + part);
    }
  }

  void train(Parameters weights) {
    const ThreadPlan threads = plan_threads(run_);
    TrainerTable table = run_.trainer;
    table.threads = threads.trainer;
    const int64_t first = from_ ? from_->step : 0;
    steps_ = first;
    latest_ = std::make_shared<const Parameters>(weights);
    if (!from_) evaluate(0, weights, 0);
    say_what_is_inert();
    EngineSampler sampler(weights, first, setup_.engine_options(threads.sampler));
    RolloutDriver driver(*setup_.conversation, sampler, clock_,
                         setup_.rollout_settings(static_cast<float>(run_.rollout.temperature)));
    RolloutScheduler scheduler(run_.orchestrator, static_cast<uint64_t>(run_.seed), table.max_steps,
                               *setup_.environments, driver, sampler, clock_);
    // The reference is the policy at step 0, also of a run that goes on.
    Trainer trainer(from_ ? initial_weights() : std::move(weights), setup_.config.loss_spec, table,
                    training_backend(run_));
    if (!from_ && !start_.optimizer.empty()) {
      trainer.load(start_.optimizer);
      // Moments go on; the rate's course is that of the new run.
      state_.course_begin = trainer.optimizer_steps();
    }
    if (from_) {
      trainer.load(from_->folder);
      const std::string name = from_->folder + "/schedule.json";
      scheduler.restore(parse_schedule_state(name, read_file(name), *setup_.environments));
    } else {
      save_initial(trainer);
    }
    trainer.set_course_begin(state_.course_begin);
    const int64_t sampled_before = scheduler.totals().sampled_tokens;
    const int64_t trained_before = state_.trained_tokens;
    summary_.trained_tokens = trained_before;
    LoopOptions options;
    options.max_steps = table.max_steps;
    options.steps_before = first;
    options.batch.advantage = {parse_advantage_kind(run_.orchestrator.advantage),
                               run_.orchestrator.length_penalty};
    options.batch.filter_zero_advantages = run_.orchestrator.filter_zero_advantages;
    options.batch.temperature = static_cast<float>(run_.rollout.temperature);
    const double begin = clock_.now(), evaluated = summary_.eval_seconds;
    progress_.begin(first);
    LoopResult result;
    try {
      TrainerLearner learner(trainer, first, state_.trained_tokens);
      LoopEvents events;
      events.on_step = [&](const StepRecord& record) { on_step(record, threads.sampler); };
      events.should_stop = [&] { return interrupt_.asked(); };
      events.wants_checkpoint = [&](int64_t step) { return checkpoints_.wanted(step); };
      events.on_checkpoint = [&](int64_t step, const ScheduleState& state) {
        state_.trained_tokens = learner.trained_tokens();
        save_checkpoint(step, trainer, state);
      };
      if (!from_ && run_.sft.enabled) save_checkpoint(0, trainer, scheduler.state());
      result = run_loop(scheduler, learner, clock_, setup_.environment_ids, options, events);
    } catch (const Error& error) {
      // A file that cannot be written, most often: the disk is full.
      result.end = LoopResult::End::gave_up;
      result.reason = error.what();
    }
    summary_.rl_seconds = clock_.now() - begin - (summary_.eval_seconds - evaluated);
    summary_.rollouts = scheduler.totals().completed;
    // Rates are of this session.
    summary_.sampled_tokens = scheduler.totals().sampled_tokens - sampled_before;
    summary_.trained_tokens -= trained_before;
    summary_.totals = scheduler.totals();
    summary_.running = scheduler.running();
    summary_.sampler_busy = sampling_ / std::max(summary_.rl_seconds, 1e-9);
    summary_.trainer_busy = learning_ / std::max(summary_.rl_seconds, 1e-9);
    if (result.end == LoopResult::End::gave_up) give_up(result.reason);
    if (result.end == LoopResult::End::stopped) summary_.end = RunSummary::End::stopped;
    if (last_evaluated_ != steps_ && result.end == LoopResult::End::finished) {
      evaluate(steps_, *latest_, 0);
    }
  }

  void on_step(const StepRecord& record, int threads) {
    latest_ = std::static_pointer_cast<const Parameters>(record.learned.weights);
    steps_ = record.step;
    files_.write_step(record);
    files_.write_given_up(record);
    log_environments();
    for (const DroppedGroup& group : record.given_up) {
      progress_.note(fmt::format("group {} of {} was given up, {} of its rollouts {}: {}",
                                 group.number, setup_.environment_ids[group.environment],
                                 group.survivors, group.trained ? "trained" : "finished",
                                 group.message));
    }
    const OutputTable& output = run_.output;
    if (output.rollouts_every > 0 &&
        (record.step % output.rollouts_every == 0 || record.step == 1)) {
      files_.write_rollouts(record, setup_, setup_.config.loss_spec, output.rollouts_groups);
    }
    const double step_seconds = metric_of(record.metrics, "time/step");
    sampling_ += metric_of(record.metrics, "perf/sampler_busy") * step_seconds;
    learning_ += record.learned.busy_seconds;
    summary_.trained_tokens =
        static_cast<int64_t>(metric_of(record.metrics, "progress/trained_tokens"));
    progress_.step(
        record.step, run_.trainer.max_steps,
        fmt::format("reward {:.3f}  mismatch_kl {:.2g}  masked {:.2f}%  lag {:.2g}  {:.0f}k "
                    "tokens/s",
                    metric_of(record.metrics, "reward/all/mean"),
                    metric_of(record.metrics, "mismatch_kl/all/mean"),
                    100.0 * metric_of(record.metrics, "is_masked"),
                    metric_of(record.metrics, "off_policy_level/all/mean"),
                    (metric_of(record.metrics, "batch/tokens") +
                     static_cast<double>(record.batch.sampled_tokens)) /
                        step_seconds / 1000.0));
    if (run_.eval.every > 0 && record.step % run_.eval.every == 0) {
      const bool last = record.step == run_.trainer.max_steps;
      evaluate(record.step, *latest_, last ? 0 : threads);
    }
    if (output.weights_every > 0 && record.step % output.weights_every == 0) {
      save_weights(record.step);
    }
  }

  // What programs of environments wrote to their stderr.
  void log_environments() {
    for (const EnvironmentMix::Member& member : setup_.environments->members()) {
      for (const std::string& line : member.environment->take_log()) {
        files_.log(fmt::format("{} {}", member.id, line));
      }
    }
  }

  void evaluate(int64_t step, const Parameters& weights, int threads) {
    const EvaluationResult result = evaluate_policy(setup_, weights, run_.eval, threads, false);
    last_evaluated_ = step;
    summary_.eval_seconds += result.seconds;
    (step == 0 ? state_.before : summary_.after) = result.metrics;
    files_.write_eval(step, result.metrics);
    progress_.note(fmt::format(
        "eval at step {}: reward {:.3f} [{:.3f}, {:.3f}] on {:.0f} held-out prompts{}", step,
        result.metric("eval/all/reward/mean"), result.metric("eval/all/reward/low"),
        result.metric("eval/all/reward/high"), result.metric("eval/all/prompts"),
        run_.eval.greedy ? fmt::format(", greedy {:.3f}", result.metric("eval/all/greedy/mean"))
                         : ""));
  }

  // A checkpoint that cannot be written costs nothing but itself: the one before is still there.
  void save_checkpoint(int64_t step, const Trainer& trainer, const ScheduleState& schedule) {
    files_.sync();
    try {
      checkpoints_.save(Phase::rl, step, [&](const std::string& folder) {
        trainer.save(folder);
        write_policy_card(folder, setup_.card);
        write_file_atomically(folder + "/schedule.json",
                              schedule_state_json(schedule, setup_.environment_ids));
        write_state(folder, state_);
      });
    } catch (const Error& error) {
      progress_.note(fmt::format(
          "warning: no checkpoint of step {}: {}; the one before stays, and the run goes on", step,
          error.what()));
    }
  }

  // The policy at step 0, which a loss with a reference reads, is not in every checkpoint.
  bool needs_initial() const {
    return setup_.config.loss_spec.reads(Stream::ref) && run_.trainer.reference == "initial";
  }
  void save_initial(const Trainer& trainer) {
    if (!needs_initial()) return;
    files_.save_weights(trainer.parameters(), 0, setup_);
    state_.initial_checksum = checksum(trainer.parameters());
  }
  Parameters initial_weights() const {
    if (!needs_initial()) return load_parameters(from_->folder);
    const std::string folder = weights_folder(files_.folder(), 0);
    Parameters weights = load_parameters(folder);
    if (checksum(weights) == state_.initial_checksum) return weights;
    throw Error(folder +
                ": is not the policy of step 0, which is the reference of this run; put it "
                "back, or start a new run");
  }

  void save_weights(int64_t step) {
    summary_.weights = files_.save_weights(*latest_, step, setup_);
  }

  const RunSetup& setup_;
  const RunConfig& run_;
  const Catalog& catalog_;
  SteadyClock clock_;
  NewRun start_;
  std::optional<Checkpoint> sft_from_, from_;  // at most one of them
  RunFiles files_;
  CheckpointStore checkpoints_;
  RunProgress progress_;
  Interrupt interrupt_;
  RunSummary summary_;
  RunState state_;
  int64_t steps_ = 0;
  std::shared_ptr<const Parameters> latest_;
  int64_t last_evaluated_ = -1;
  double sampling_ = 0.0, learning_ = 0.0;
};

}  // namespace

RunSummary run_training(RunSetup& setup, const Catalog& catalog, const NewRun& start) {
  refuse_sampling(setup.config.run.rollout);
  RunFiles files(claim_folder(setup.config.run.output_dir));
  if (start.own_weights) {
    const std::string weights = files.save_weights(setup.weights, 0, setup);
    set_model_path(setup.config, std::filesystem::absolute(weights).string());
  }
  files.begin(setup.config, explain_text(setup.config.loss_spec), "train");
  return Run(setup, catalog, std::move(files), start).run();
}

RunSummary resume_training(const RunSetup& setup, const Catalog& catalog, Resumption resumption) {
  refuse_sampling(setup.config.run.rollout);
  const Checkpoint from = *resumption.from;
  const std::vector<std::string> notes = resumption.notes;
  RunFiles files(setup.config, explain_text(setup.config.loss_spec), std::move(resumption));
  return Run(setup, catalog, std::move(files), from, notes).run();
}

RunSummary finished_summary(const Resumption& resumption) {
  const RunEnd& end = *resumption.end;
  RunSummary summary;
  summary.finished_before = true;
  summary.folder = resumption.folder;
  summary.steps = end.steps;
  summary.max_steps = end.max_steps;
  summary.sft_steps = end.sft_steps;
  summary.sft_seconds = end.sft_seconds;
  if (auto first = first_evaluation(resumption.folder)) summary.before = std::move(first->second);
  if (auto last = last_evaluation(resumption.folder)) summary.after = std::move(last->second);
  summary.totals = end.totals;
  summary.rollouts = end.totals.completed;
  const std::string weights = weights_folder(resumption.folder, end.steps);
  std::error_code ignored;
  if (std::filesystem::exists(weights, ignored)) summary.weights = weights;
  return summary;
}

}  // namespace leeway
