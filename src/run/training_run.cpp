#include "run/training_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <optional>
#include <thread>

#include "base/files.h"
#include "config/given.h"
#include "leeway/error.h"
#include "orchestrator/loop.h"
#include "orchestrator/schedule_checks.h"
#include "orchestrator/schedule_state_json.h"
#include "orchestrator/steady_clock.h"
#include "report/run_folder.h"
#include "report/run_page.h"
#include "run/background_writer.h"
#include "run/checkpoints.h"
#include "run/devices.h"
#include "run/engine_sampler.h"
#include "run/environment_check.h"
#include "run/explain_text.h"
#include "run/failure.h"
#include "run/interrupt.h"
#include "run/policy_card.h"
#include "run/policy_evaluation.h"
#include "run/run_end.h"
#include "run/run_progress.h"
#include "run/run_state.h"
#include "run/run_warnings.h"
#include "run/sft_phase.h"
#include "run/trainer_learner.h"
#include "trainer/state_files.h"

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

RunState read_state(const std::string& folder) {
  const std::string name = folder + "/run.json";
  return parse_run_state(name, read_file(name));
}

ScheduleState read_schedule(const RunSetup& setup, const Checkpoint& checkpoint,
                            int64_t vocabulary) {
  const std::string name = checkpoint.folder + "/schedule.json";
  ScheduleState state = parse_schedule_state(name, read_file(name), *setup.environments);
  check_schedule_state(name, state, setup.config.run.orchestrator, checkpoint.step, vocabulary);
  return state;
}

void set_model_path(Config& config, const std::string& path) {
  config.run.model.path = path;
  for (EffectiveValue& value : config.effective) {
    if (value.key == "model.path") value.value = toml_string(path);
  }
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
        progress_(&files_),
        // A checkpoint holds the weights and two moments of each, a weights folder them alone.
        warnings_(run_.orchestrator.prompts_per_batch,
                  4 * sizeof(float) * static_cast<uint64_t>(setup.weights.count())) {
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
    // A file that cannot be written, most often: the disk is full.
    if (const auto failure = failure_in([&] {
          progress_.note(fmt::format("run folder {}", files_.folder()));
          from_ ? go_on() : begin_run();
        })) {
      give_up(*failure);
    }
    if (const auto failure = failure_in([&] {
          if (latest_) summary_.weights = save_weights(steps_, latest_->host());
        })) {
      summary_.weights.clear();
      give_up(*failure);
    }
    if (const auto failure = failure_in([&] { log_environments(); })) give_up(*failure);
    summary_.sft_steps = state_.sft_steps;
    summary_.sft_seconds = state_.sft_seconds;
    summary_.before = state_.before;
    summary_.steps = steps_;
    summary_.seconds = clock_.now() - begin;
    if (const auto failure = failure_in([&] { keep_end(); })) give_up(*failure);
    if (const auto failure = failure_in([&] { files_.write_report(); })) {
      give_up(*failure);
      // end.json must not say that all is well; it may not fit on the disk any more.
      if (failure_in([&] { keep_end(); })) {
        static_cast<void>(failure_in([&] { remove_run_end(files_.folder()); }));
      }
    }
    return summary_;
  }

 private:
  // The first reason is the one that counts.
  void give_up(const std::string& reason) {
    if (summary_.end != RunSummary::End::gave_up) summary_.reason = reason;
    summary_.end = RunSummary::End::gave_up;
  }

  void stop(const std::string& reason) {
    if (summary_.end != RunSummary::End::finished) return;
    summary_.end = RunSummary::End::stopped;
    summary_.reason = reason;
  }

  // Why the run ended, in the log and in end.json, from where the report has it.
  void keep_end() {
    const RunEnd end{.end = name_of(summary_.end),
                     .reason = summary_.reason,
                     .steps = summary_.steps,
                     .max_steps = run_.trainer.max_steps,
                     .sft_steps = state_.sft_steps,
                     .sft_seconds = state_.sft_seconds,
                     .totals = summary_.totals};
    files_.log(run_end_line(end));
    write_run_end(files_.folder(), end);
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
      if (sft.stopped) stop("asked to, in the supervised phase");
    }
    if (summary_.end == RunSummary::End::finished) {
      train(std::move(weights));
    } else {
      latest_ = std::make_shared<const PolicySnapshot>(std::move(weights), 0);
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
    latest_ = std::make_shared<const PolicySnapshot>(weights, first);
    // The first evaluation of a run that goes on may have been stopped.
    if (first == 0 && state_.before.empty()) evaluate(0, *latest_, 0);
    say_what_is_inert();
    EngineSampler sampler(*latest_, setup_.engine_options(threads.sampler));
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
      scheduler.restore(read_schedule(setup_, *from_, trainer.config().vocab_size));
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
    const auto failure = failure_in([&] {
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
    });
    if (failure) {  // a full disk, most often
      result.end = LoopResult::End::gave_up;
      result.reason = *failure;
    }
    writer_.wait();
    say_what_was_not_written();
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
    if (result.end == LoopResult::End::stopped) stop("asked to");
    if (last_evaluated_ != steps_ && result.end == LoopResult::End::finished) {
      evaluate(steps_, *latest_, 0);
      if (last_evaluated_ != steps_) stop("asked to, in the last evaluation");
    }
  }

  void on_step(const StepRecord& record, int threads) {
    latest_ = record.learned.weights;
    steps_ = record.step;
    say_what_was_not_written();
    files_.write_step(record);
    files_.write_given_up(record);
    log_environments();
    for (const DroppedGroup& group : record.given_up) {
      progress_.note(fmt::format("group {} of {} was given up, {} of its rollouts {}: {}",
                                 group.number, setup_.environment_ids[group.environment],
                                 group.survivors, group.trained ? "trained" : "finished",
                                 group.message));
    }
    tell_failures(record);
    note_all(warnings_.on_step(record.metrics));
    std::error_code unknown;
    const auto space = std::filesystem::space(files_.folder(), unknown);
    if (!unknown) note_all(warnings_.on_disk(space.available));
    const OutputTable& output = run_.output;
    if (output.rollouts_every > 0 &&
        (record.step % output.rollouts_every == 0 || record.step == 1)) {
      files_.write_rollouts(record, setup_, setup_.config.loss_spec, output.rollouts_groups);
    }
    if (output.batches_every > 0 && (record.step % output.batches_every == 0 || record.step == 1)) {
      files_.write_batch(record);
    }
    const double step_seconds = metric_of(record.metrics, "time/step");
    sampling_ += metric_of(record.metrics, "perf/sampler_busy") * step_seconds;
    learning_ += record.learned.busy_seconds;
    summary_.trained_tokens =
        static_cast<int64_t>(metric_of(record.metrics, "progress/trained_tokens"));
    progress_.step(
        record.step, run_.trainer.max_steps,
        fmt::format("reward {:.3f}  mismatch_kl {:.2g}  masked {:.2f}%  lag {:.2g}  {:.0f}k "
                    "tokens/s{}",
                    metric_of(record.metrics, "reward/all/mean"),
                    metric_of(record.metrics, "mismatch_kl/all/mean"),
                    100.0 * metric_of(record.metrics, "is_masked"),
                    metric_of(record.metrics, "off_policy_level/all/mean"),
                    (metric_of(record.metrics, "batch/tokens") +
                     static_cast<double>(record.batch.sampled_tokens)) /
                        step_seconds / 1000.0,
                    failed_ > 0 ? fmt::format("  {} failed", failed_) : ""));
    if (run_.eval.every > 0 && record.step % run_.eval.every == 0) {
      const bool last = record.step == run_.trainer.max_steps;
      evaluate(record.step, *latest_, last ? 0 : threads);
    }
    if (output.weights_every > 0 && record.step % output.weights_every == 0) {
      writer_.start(
          fmt::format("weights of step {}", record.step),
          [this, step = record.step, weights = latest_] { save_weights(step, weights->host()); });
    }
  }

  // What programs of environments wrote to their stderr.
  void log_environments() {
    for (const EnvironmentMix::Member& member : setup_.environments->members()) {
      for (const std::string& line : member.environment->take_log()) {
        files_.log(fmt::format("{} {}", member.id, line));
      }
      for (const std::string& warning : member.environment->take_warnings()) {
        progress_.note(fmt::format("warning: environment {}: {}", member.id, warning));
      }
    }
  }

  // One that is stopped leaves no trace: it is made when the run goes on.
  void evaluate(int64_t step, const PolicySnapshot& weights, int threads) {
    const EvaluationResult result = evaluate_policy(setup_, weights, run_.eval, threads, false,
                                                    [&] { return interrupt_.asked(); });
    summary_.eval_seconds += result.seconds;
    progress_.note(evaluation_line(step, result));
    if (result.stopped) return;
    last_evaluated_ = step;
    (step == 0 ? state_.before : summary_.after) = result.metrics;
    files_.write_eval(step, result.metrics);
    if (step > 0) note_all(warnings_.on_evaluation(step, state_.before, result.metrics));
  }

  void note_all(const std::vector<std::string>& lines) {
    for (const std::string& line : lines) progress_.note(line);
  }

  // Failures of a step, by kind, with the last one's message; the first time on stderr too.
  void tell_failures(const StepRecord& record) {
    std::string kinds;
    double failed = 0.0;
    for (const auto& [name, value] : record.metrics) {
      if (!name.starts_with("failures/")) continue;
      kinds += fmt::format("{}{} {:.0f}", kinds.empty() ? "" : ", ", name.substr(9), value);
      failed += value;
    }
    const double unasked = metric_of(record.metrics, "unasked_answers/all");
    if (unasked > 0.0) {
      files_.log(
          fmt::format("step {}: {:.0f} answers of environments' programs that nothing had "
                      "asked for; the lines are above",
                      record.step, unasked));
    }
    if (failed == 0.0) return;
    failed_ += static_cast<int64_t>(failed);
    const std::string line =
        fmt::format("step {}: {:.0f} rollouts failed ({}) and are tried again; the last: {}",
                    record.step, failed, kinds, record.last_failure);
    if (std::exchange(told_failures_, true)) {
      files_.log(line);
    } else {
      progress_.note(line + " (later ones are in log.txt)");
    }
  }

  // The run waits for a copy of its state, and for the checkpoint before if that is still being
  // written.
  void save_checkpoint(int64_t step, const Trainer& trainer, const ScheduleState& schedule) {
    writer_.wait();
    say_what_was_not_written();
    auto trained = std::make_shared<const TrainingState>(trainer.state());
    writer_.start(fmt::format("checkpoint of step {}", step),
                  [this, step, trained, schedule, state = state_] {
                    write_checkpoint(step, *trained, schedule, state);
                  });
  }

  // Beside training: touches nothing that changes.
  void write_checkpoint(int64_t step, const TrainingState& trained, const ScheduleState& schedule,
                        const RunState& state) const {
    if (const std::string bad = not_finite_text(trained); !bad.empty()) throw Error(bad);
    refuse_full_disk(files_.path("checkpoints"),
                     3 * sizeof(float) * static_cast<uint64_t>(trained.policy.count()));
    files_.sync();
    checkpoints_.save(Phase::rl, step, [&](const std::string& folder) {
      FileSums sums = save_state(folder, trained.policy, trained.optimizer);
      sums["leeway.json"] = write_policy_card(folder, setup_.card);
      sums["schedule.json"] = write_file_atomically(
          folder + "/schedule.json", schedule_state_json(schedule, setup_.environment_ids));
      sums["run.json"] = write_file_atomically(folder + "/run.json", run_state_json(state));
      return sums;
    });
  }

  // What cannot be written costs nothing but itself: what was there before is still there.
  void say_what_was_not_written() {
    for (const std::string& failure : writer_.take_failures()) {
      progress_.note(
          fmt::format("warning: {}; the one before stays, and the run goes on", failure));
    }
  }

  // The policy at step 0, which a loss with a reference reads, is not in every checkpoint.
  bool needs_initial() const {
    return setup_.config.loss_spec.reads(Stream::ref) && run_.trainer.reference == "initial";
  }
  void save_initial(const Trainer& trainer) {
    if (!needs_initial()) return;
    const auto weights = trainer.snapshot(0);
    save_weights(0, weights->host());
    state_.initial_checksum = weights->checksum();
  }
  Parameters initial_weights() const {
    if (!needs_initial()) return load_parameters(from_->folder);
    const std::string folder = weights_folder(files_.folder(), 0);
    std::string problem = "its numbers are others";
    try {
      Parameters weights = load_parameters(folder);
      if (checksum(weights) == state_.initial_checksum) return weights;
    } catch (const Error& error) {
      problem = error.what();
    }
    throw Error(
        fmt::format("{}: is not the policy of step 0, which is the reference of this run; "
                    "put it back, or start a new run ({})",
                    folder, problem));
  }

  std::string save_weights(int64_t step, const Parameters& weights) const {
    return files_.save_weights(weights, step, setup_);
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
  BackgroundWriter writer_;
  Interrupt interrupt_;
  RunSummary summary_;
  RunState state_;
  int64_t steps_ = 0;
  std::shared_ptr<const PolicySnapshot> latest_;
  int64_t last_evaluated_ = -1;
  double sampling_ = 0.0, learning_ = 0.0;
  int64_t failed_ = 0;  // rollouts, in this session
  bool told_failures_ = false;
  RunWarnings warnings_;
};

}  // namespace

const char* name_of(RunSummary::End end) {
  switch (end) {
    case RunSummary::End::finished: return "finished";
    case RunSummary::End::stopped: return "stopped";
    case RunSummary::End::gave_up: return "gave_up";
  }
  return "";
}

void check_checkpoint(const RunSetup& setup, const Checkpoint& checkpoint) {
  if (checkpoint.phase == Phase::sft) return check_sft_checkpoint(checkpoint);
  read_state(checkpoint.folder);
  const TrainingState trained = load_state(checkpoint.folder);
  read_schedule(setup, checkpoint, trained.policy.config().vocab_size);
}

RunSummary run_training(RunSetup& setup, const Catalog& catalog, const NewRun& start) {
  refuse_sampling(setup.config.run.rollout);
  check_environments(*setup.environments);
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
  check_environments(*setup.environments);
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
  if (is_present(weights)) summary.weights = weights;
  return summary;
}

}  // namespace leeway
