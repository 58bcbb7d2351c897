#include "run/training_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <optional>
#include <thread>

#include "config/given.h"
#include "core/explain_text.h"
#include "leeway/error.h"
#include "model/adapter_io.h"
#include "orchestrator/advantage_program.h"
#include "orchestrator/loop.h"
#include "orchestrator/steady_clock.h"
#include "run/devices.h"
#include "run/environment_check.h"
#include "run/failure.h"
#include "run/last_weights.h"
#include "run/logged_progress.h"
#include "run/run_end.h"
#include "run/run_evaluations.h"
#include "run/run_files.h"
#include "run/run_ranks.h"
#include "run/run_sampler.h"
#include "run/run_saving.h"
#include "run/run_warnings.h"
#include "run/sft_phase.h"
#include "run/step_reports.h"
#include "run/text_check.h"
#include "run/trainer_learner.h"

namespace leeway {
namespace {

// Refuses sampling settings that cannot be trained on: tokens drawn from a different distribution
// than the trainer computes, or greedy ones.
void refuse_sampling(const RolloutTable& table) {
  if (table.temperature == 0.0) {
    throw Error(
        "rollout.temperature = 0: greedy rollouts of a prompt are all the same, so that there is "
        "nothing to learn; set a temperature above 0");
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

// The run's own copy of what it starts with: the model, or the adapter over it.
void set_own_weights(Config& config, const std::string& path) {
  ModelTable& model = config.run.model;
  (model.lora.enabled ? model.lora.path : model.path) = path;
  for (EffectiveValue& value : config.effective) {
    const bool is_it = value.key == (model.lora.enabled ? "model.lora.path" : "model.path");
    if (is_it) value.value = toml_string(path);
  }
}

LoopOptions loop_options(const RunConfig& run, int64_t steps_before, AdvantageProgram* program) {
  LoopOptions options;
  options.max_steps = run.trainer.max_steps;
  options.steps_before = steps_before;
  options.batch.advantage = {run.orchestrator.advantage, run.orchestrator.length_penalty};
  options.batch.program = program;
  options.batch.filter_zero_advantages = run.orchestrator.filter_zero_advantages;
  options.batch.temperature = static_cast<float>(run.rollout.temperature);
  return options;
}

// Where a run tells what happens, and what ends it early.
struct RunHost {
  Progress& progress;
  const StopCondition& should_stop;
  AdvantageProgram* program = nullptr;  // of orchestrator.advantage_command; null: none
};

// Started and greeted, so that a program that does not work is the user's mistake before anything
// is written. Null without orchestrator.advantage_command.
std::unique_ptr<AdvantageProgram> checked_program(const OrchestratorTable& table, Clock& clock) {
  if (table.advantage_command.empty()) return nullptr;
  auto program = std::make_unique<AdvantageProgram>(table, clock);
  program->check();
  return program;
}

class Run {
 public:
  Run(const RunSetup& setup, const Catalog& catalog, RunFiles files, const NewRun& start,
      const RunHost& host)
      : setup_(setup),
        run_(setup.config.run),
        catalog_(catalog),
        start_(start),
        should_stop_(host.should_stop),
        program_(host.program),
        files_(std::move(files)),
        progress_(host.progress, files_),
        saving_(setup, files_, progress_),
        last_weights_(run_, saving_.checkpoints(), progress_),
        // A checkpoint contains the weights and two moments of each, a weights folder only the
        // weights.
        warnings_(run_.orchestrator.prompts_per_batch,
                  4 * sizeof(float) * static_cast<uint64_t>(setup.weights.count())),
        reports_(setup, files_, progress_, warnings_, program_),
        evaluator_(setup),
        evaluations_({setup, files_, progress_, should_stop_, warnings_, evaluator_}) {
    static_cast<void>(should_stop_());  // from here on a stop is the run's to handle
    for (const std::string& note : start_.notes) progress_.note(note);
  }
  Run(const RunSetup& setup, const Catalog& catalog, RunFiles files, const Checkpoint& from,
      const std::vector<std::string>& notes, const RunHost& host)
      : Run(setup, catalog, std::move(files), NewRun{.notes = notes}, host) {
    (from.phase == Phase::sft ? sft_from_ : from_) = from;
    summary_.resumed = RunSummary::Resumed{};
    progress_.note(fmt::format("resumed from {}", from.name()));
    if (!files_.moved().empty()) progress_.note(files_.moved());
    const auto first = metrics_of_first_step(files_.folder());
    if (from_ && first) warnings_.compare_with(*first);
  }

  RunSummary run() {
    const double begin = clock_.now();
    summary_.folder = files_.folder();
    summary_.max_steps = run_.trainer.max_steps;
    // Usually a full disk.
    attempt([&] {
      progress_.note(fmt::format("run folder {}", files_.folder()));
      if (setup_.ranks != nullptr) progress_.note(setup_.ranks->line());
      from_ ? go_on() : begin_run();
    });
    release_sampler();
    if (!attempt([&] {
          if (const auto& last = last_weights_.snapshot()) {
            summary_.weights = saving_.save_weights(last->version(), last->host());
          }
        })) {
      summary_.weights.clear();
    }
    attempt([&] {
      reports_.end_failures();
      reports_.log_environments();
    });
    summary_.sft_steps = state_.sft_steps;
    summary_.sft_seconds = state_.sft_seconds;
    summary_.before = evaluations_.before();
    summary_.after = evaluations_.after();
    summary_.eval_seconds = evaluations_.seconds();
    summary_.steps = steps_;
    summary_.seconds = clock_.now() - begin;
    attempt([&] { keep_end(); });
    const bool has_report = attempt([&] { files_.write_report(); });
    if (has_report) summary_.report = summary_.folder + "/report.html";
    if (!has_report) {
      // end.json must not claim success; it may no longer fit on the disk.
      if (failure_in([&] { keep_end(); })) {
        static_cast<void>(failure_in([&] { remove_run_end(files_.folder()); }));
      }
    }
    return summary_;
  }

 private:
  // What fails makes the run give up; false then.
  template <class Work>
  bool attempt(const Work& work) {
    const auto failure = failure_in(work);
    if (failure) give_up(*failure);
    return !failure;
  }

  // The first reason is kept.
  void give_up(const std::string& reason) {
    if (summary_.end != RunSummary::End::gave_up) summary_.reason = reason;
    summary_.end = RunSummary::End::gave_up;
  }

  void stop(const std::string& reason) {
    if (summary_.end != RunSummary::End::finished) return;
    summary_.end = RunSummary::End::stopped;
    summary_.reason = reason;
  }

  // Records why the run ended, in the log and in end.json, which the report reads.
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
    state_ = read_run_state(*from_);
    summary_.resumed->sft_seconds = state_.sft_seconds;
    evaluations_.restore(state_.before);
    train(load_like(setup_.weights, from_->folder));
  }

  void begin_run() {
    Parameters weights = setup_.weights;
    if (run_.sft.enabled) {
      const double begin = clock_.now();
      SftResult sft = run_sft(
          {setup_, catalog_, files_, progress_, should_stop_, saving_.checkpoints(), evaluator_},
          sft_from_ ? &*sft_from_ : nullptr);
      state_.sft_steps = sft.state.steps;
      state_.sft_seconds = sft.state.seconds;
      if (sft_from_) {
        summary_.resumed->sft_seconds = state_.sft_seconds - (clock_.now() - begin);
      }
      weights = std::move(sft.weights);
      if (!sft.failure.empty()) give_up(sft.failure);
      if (sft.stopped) stop("asked to, in the supervised phase");
    }
    if (summary_.end == RunSummary::End::finished) {
      train(std::move(weights));
    } else {
      last_weights_.set(std::make_shared<const PolicySnapshot>(std::move(weights), 0));
    }
  }

  void say_what_is_inert() {
    const bool on_policy = run_.orchestrator.max_off_policy_steps == 0 && rollouts_are_exact(run_);
    for (const std::string& part : inert_parts(setup_.config.loss_spec, run_.trainer, on_policy)) {
      progress_.note("note: " + part);
    }
    const int64_t positions = setup_.weights.config().max_position_embeddings;
    if (run_.rollout.max_new_tokens < positions) return;
    progress_.note(
        fmt::format("note: rollout.max_new_tokens = {} has no effect: the model has {} positions "
                    "for prompt and answer together, and they end an answer before",
                    run_.rollout.max_new_tokens, positions));
  }

  // Of the policy before the first step; of a run that goes on, those that were stopped.
  void evaluate_first() {
    if (!from_) return evaluations_.evaluate(0, last_weights_.snapshot());
    for (const int64_t step : evaluations_.missing(from_->step)) {
      evaluations_.evaluate(
          step, step == from_->step
                    ? last_weights_.snapshot()
                    : std::make_shared<const PolicySnapshot>(
                          load_like(setup_.weights, weights_folder(files_.folder(), step)),
                          static_cast<PolicyVersion>(step)));
    }
  }

  void load_optimizer(Trainer& trainer) {
    if (from_) {
      trainer.load(from_->folder);
    } else {
      if (!start_.optimizer.empty()) {
        trainer.load(start_.optimizer);
        // The moments are taken over; the learning rate's schedule starts with the new run.
        state_.schedule_begin = trainer.optimizer_steps();
      }
      saving_.save_reference(trainer, state_);
    }
    trainer.set_schedule_begin(state_.schedule_begin);
  }

  void train(Parameters weights) {
    choose_device_memory(run_.model.device, !setup_.samples_in_process());
    const ThreadPlan threads = plan_threads(run_, setup_.cores());
    TrainerTable table = run_.trainer;
    table.threads = threads.trainer;
    const PolicyVersion first = from_ ? static_cast<PolicyVersion>(from_->step) : 0;
    steps_ = first;
    last_weights_.set(std::make_shared<const PolicySnapshot>(weights, first));
    run_sampler_ = std::make_unique<RunSampler>(setup_, last_weights_.snapshot(), threads.sampler,
                                                files_, progress_, should_stop_, clock_);
    RunSampler& run_sampler = *run_sampler_;
    Sampler& sampler = run_sampler.sampler();
    SharedSampler* servers = run_sampler.servers();
    if (servers != nullptr) evaluator_.sample_with(servers);
    evaluations_.set_beside([&] { run_sampler.tell(); });
    evaluate_first();
    if (servers != nullptr && servers->version() != first) {
      sampler.update_weights(last_weights_.snapshot(), first);
    }
    say_what_is_inert();
    RolloutDriver driver(*setup_.conversation, sampler, clock_,
                         setup_.rollout_settings(static_cast<float>(run_.rollout.temperature)));
    RolloutScheduler scheduler(run_.orchestrator, static_cast<uint64_t>(run_.seed), table.max_steps,
                               *setup_.environments, driver, sampler, clock_);
    // The reference is the policy at step 0, also in a resumed run.
    Trainer trainer(from_ ? saving_.reference(*from_, state_) : std::move(weights),
                    setup_.config.loss_spec, table, setup_.training_backend());
    load_optimizer(trainer);
    if (from_) {
      scheduler.restore(read_schedule(setup_, *from_, trainer.config().vocab_size));
    }
    if (summary_.resumed) {
      summary_.resumed->steps = first;
      summary_.resumed->rollouts = scheduler.totals().completed;
    }
    const int64_t sampled_before = scheduler.totals().sampled_tokens;
    const int64_t trained_before = state_.trained_tokens;
    const double begin = clock_.now(), blocked_before = evaluations_.blocked_seconds();
    progress_.begin_steps(first);
    LoopResult result;
    std::optional<TrainerLearner> learner;
    const auto failure = failure_in([&] {
      learner.emplace(trainer, first, state_.trained_tokens, setup_.samples_beside_training());
      result = loop(scheduler, *learner, trainer, first, run_sampler);
    });
    // Before anything that may fail: what the trainer alone has would be lost with it. But after
    // what is being written, so that the host does not need room for both.
    std::optional<std::string> lost;
    if (learner) {
      learner->end();
      saving_.settle();
      lost = last_weights_.take_from(trainer, *learner);
    }
    evaluations_.set_beside([&] { run_sampler.tell(); });
    run_sampler.tell();
    if (failure) {  // a full disk, most often
      result.end = LoopResult::End::gave_up;
      result.reason = *failure;
    }
    saving_.wait();
    last_weights_.tell_what_is_written(steps_);
    const double blocked = evaluations_.blocked_seconds() - blocked_before;
    summary_.rl_seconds = clock_.now() - begin - blocked;
    summary_.rollouts = scheduler.totals().completed;
    // Rates cover this session only.
    summary_.sampled_tokens = scheduler.totals().sampled_tokens - sampled_before;
    summary_.trained_tokens = std::max<int64_t>(0, reports_.trained_tokens() - trained_before);
    summary_.totals = scheduler.totals();
    summary_.running = scheduler.running();
    summary_.sampler_busy = reports_.sampling_seconds() / std::max(summary_.rl_seconds, 1e-9);
    summary_.trainer_busy = reports_.learning_seconds() / std::max(summary_.rl_seconds, 1e-9);
    if (result.end == LoopResult::End::gave_up) give_up(result.reason);
    if (lost) give_up(*lost);
    if (result.end == LoopResult::End::stopped) stop("asked to");
    evaluations_.finish();
    if (evaluations_.last_step() != steps_ && result.end == LoopResult::End::finished &&
        last_weights_.snapshot()) {
      evaluations_.evaluate(steps_, last_weights_.snapshot());
      if (evaluations_.last_step() != steps_) stop("asked to, in the last evaluation");
    }
  }

  void release_sampler() {
    evaluations_.set_beside({});
    if (evaluator_.has_servers()) evaluator_.sample_with(nullptr);
    run_sampler_.reset();
  }

  LoopResult loop(RolloutScheduler& scheduler, TrainerLearner& learner, const Trainer& trainer,
                  int64_t first, RunSampler& run_sampler) {
    const auto save = [&](int64_t step, const ScheduleState& schedule) {
      evaluations_.settle(step);
      state_.before = evaluations_.before();
      saving_.save_checkpoint(step, trainer, schedule, state_);
    };
    LoopEvents events;
    events.on_step = [&](const StepRecord& record) { on_step(record); };
    events.on_failure = [&](const RolloutFailure& failure) {
      reports_.failed(failure, clock_.now());
    };
    events.on_sampled = [&] { evaluations_.evaluate_served(); };
    events.more_metrics = [&] {
      Metrics metrics = run_sampler.take_metrics();
      if (setup_.ranks == nullptr) return metrics;
      for (auto& metric : setup_.ranks->take_metrics()) metrics.push_back(std::move(metric));
      if (const std::string line = setup_.ranks->take_warning(); !line.empty())
        progress_.note(line);
      return metrics;
    };
    events.should_stop = [&] {
      run_sampler.tell();
      const bool stop = should_stop_();
      if (stop) evaluations_.cancel();
      return stop;
    };
    events.wants_checkpoint = [&](int64_t step) { return saving_.checkpoints().wanted(step); };
    events.on_checkpoint = [&](int64_t step, const ScheduleState& schedule) {
      state_.trained_tokens = learner.trained_tokens();
      save(step, schedule);
    };
    // In the free schedule rollouts go on while servers sample for an evaluation; there can be no
    // newer weights for them, since those come through this thread.
    if (run_.orchestrator.schedule == RolloutSchedule::free) {
      evaluations_.set_beside([&] {
        run_sampler.tell();
        scheduler.pump(0.0);
      });
    }
    if (!from_ && run_.sft.enabled) save(0, scheduler.state());
    return run_loop(scheduler, learner, clock_, setup_.environment_ids,
                    loop_options(run_, first, program_), events);
  }

  void on_step(const StepRecord& record) {
    const std::shared_ptr<const PolicySnapshot>& weights = record.learned.weights;
    last_weights_.set(weights);
    steps_ = record.step;
    saving_.tell_failures();
    evaluations_.collect();
    reports_.add(record);
    evaluations_.evaluate_served();
    if (evaluations_.due(record.step)) evaluations_.evaluate_step(record.step, weights);
    const int64_t weights_every = run_.output.weights_every;
    if (weights_every == 0 || record.step % weights_every != 0) return;
    // The last ones are written with all digits at the end; a kill must not leave rounded ones.
    if (weights->is_rounded() && record.step == run_.trainer.max_steps) return;
    saving_.save_weights_beside(record.step, weights);
  }

  const RunSetup& setup_;
  const RunConfig& run_;
  const Catalog& catalog_;
  SteadyClock clock_;
  NewRun start_;
  std::optional<Checkpoint> sft_from_, from_;  // at most one of them
  const StopCondition& should_stop_;
  AdvantageProgram* program_;
  RunFiles files_;
  LoggedProgress progress_;
  RunSaving saving_;
  LastWeights last_weights_;
  RunWarnings warnings_;
  StepReports reports_;
  std::unique_ptr<RunSampler> run_sampler_;  // while it trains
  PolicyEvaluator evaluator_;
  RunEvaluations evaluations_;
  RunSummary summary_;
  RunState state_;
  int64_t steps_ = 0;
};

// Before anything is written; returns notes.
std::vector<std::string> check_setup(const RunSetup& setup, bool goes_on = false) {
  refuse_sampling(setup.config.run.rollout);
  check_environments(*setup.environments);
  std::vector<std::string> notes = check_text(setup, goes_on);
  check_servers(setup);
  return notes;
}

}  // namespace

std::vector<std::string> check_training(const RunSetup& setup) {
  std::vector<std::string> notes = check_setup(setup);
  SteadyClock clock;
  checked_program(setup.config.run.orchestrator, clock);
  return notes;
}

RunSummary run_training(RunSetup& setup, const Catalog& catalog, const NewRun& start,
                        Progress& progress, const StopCondition& should_stop) {
  NewRun noted = start;
  for (std::string& note : check_setup(setup)) noted.notes.push_back(std::move(note));
  if (setup.ranks != nullptr) setup.ranks->begin(setup, catalog);
  SteadyClock clock;
  const auto program = checked_program(setup.config.run.orchestrator, clock);
  RunFiles files(claim_folder(setup.config.run.output_dir));
  // A new adapter stays over the model where that lies.
  const LoraTable& lora = setup.config.run.model.lora;
  if (start.own_weights && !(lora.enabled && lora.path.empty())) {
    const std::string weights = files.save_weights(setup.weights, 0, setup);
    set_own_weights(setup.config, std::filesystem::absolute(weights).string());
  }
  files.begin(setup.config, explain_text(setup.config.loss_spec), "train");
  return Run(setup, catalog, std::move(files), noted, {progress, should_stop, program.get()}).run();
}

RunSummary resume_training(const RunSetup& setup, const Catalog& catalog, Resumption resumption,
                           Progress& progress, const StopCondition& should_stop) {
  const std::vector<std::string> of_setup = check_setup(setup, /*goes_on=*/true);
  if (setup.ranks != nullptr) setup.ranks->begin(setup, catalog);
  SteadyClock clock;
  const auto program = checked_program(setup.config.run.orchestrator, clock);
  const Checkpoint from = *resumption.from;
  std::vector<std::string> notes = resumption.notes;
  notes.insert(notes.end(), of_setup.begin(), of_setup.end());
  RunFiles files(setup.config, explain_text(setup.config.loss_spec), std::move(resumption));
  return Run(setup, catalog, std::move(files), from, notes, {progress, should_stop, program.get()})
      .run();
}

}  // namespace leeway
