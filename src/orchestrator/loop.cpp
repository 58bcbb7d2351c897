#include "orchestrator/loop.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "leeway/error.h"

namespace leeway {
namespace {

constexpr double kSamplingSlice = 0.005;  // seconds between two polls of the learner
constexpr double kWaitSlice = 0.05;       // seconds for which an idle loop waits for the learner

// What the loop's thread did since the last update, in seconds. Together with what is left over
// these are the whole step.
struct ThreadTimes {
  double sample = 0.0, wait_for_environments = 0.0, prepare_batch = 0.0, report = 0.0,
         checkpoint = 0.0, wait_for_trainer = 0.0;
  double all() const {
    return sample + wait_for_environments + prepare_batch + report + checkpoint + wait_for_trainer;
  }
};

class Loop {
 public:
  Loop(RolloutScheduler& scheduler, Learner& learner, const Clock& clock,
       const std::vector<std::string>& ids, const LoopOptions& options, const LoopEvents& events)
      : scheduler_(scheduler),
        learner_(learner),
        clock_(clock),
        ids_(ids),
        options_(options),
        events_(events),
        begin_(clock.now()),
        last_step_(begin_),
        learner_idle_since_(begin_),
        step_(options.steps_before),
        saved_(options.steps_before),
        sampled_before_(scheduler.totals().sampled_tokens) {}

  LoopResult run() {
    LoopResult result;
    result.steps = options_.steps_before;
    while (result.steps < options_.max_steps || checkpoint_due_) {
      if (!batch_failure_.empty()) return give_up(result, batch_failure_);
      const bool stop = events_.should_stop();
      if (stop && !in_progress_ && result.steps > saved_) checkpoint_due_ = true;
      if (checkpoint_due_ && scheduler_.version() == result.steps) {
        checkpoint_due_ = false;
        saved_ = result.steps;
        timed(times_.checkpoint, [&] { events_.on_checkpoint(result.steps, scheduler_.state()); });
        continue;
      }
      if (stop && !in_progress_ && !checkpoint_due_) {
        result.end = LoopResult::End::stopped;
        return result;
      }
      if (!stop && !checkpoint_due_) start_learner();
      // A checkpoint waits until the sampler has the newest weights.
      if (!stop || checkpoint_due_) sample();
      if (const std::string reason = scheduler_.dead_end(); !reason.empty() && !in_progress_) {
        return give_up(result, reason);
      }
      if (!in_progress_) continue;
      const bool idle = stop || scheduler_.running() == 0;
      std::optional<LearnerResult> learned;
      timed(times_.wait_for_trainer, [&] { learned = learner_.poll(idle ? kWaitSlice : 0.0); });
      if (!learned) continue;
      if (!learned->failure.empty()) {
        return give_up(result, fmt::format("{} ({})", learned->failure, groups_in_progress()));
      }
      result.steps = learned->version;
      finish_step(std::move(*learned));
    }
    return result;
  }

 private:
  template <class Work>
  void timed(double& seconds, const Work& work) {
    const double begin = clock_.now();
    work();
    seconds += clock_.now() - begin;
  }

  static LoopResult give_up(LoopResult result, std::string reason) {
    result.end = LoopResult::End::gave_up;
    result.reason = std::move(reason);
    return result;
  }

  // Which batch the learner has, for messages.
  std::string groups_in_progress() const {
    std::vector<int64_t> numbers;
    for (const Group& group : in_progress_->groups) numbers.push_back(group.number);
    std::sort(numbers.begin(), numbers.end());
    if (numbers.size() < 2) return fmt::format("the batch of group {}", numbers.front());
    return fmt::format("the batch of {} groups from {} to {}", numbers.size(), numbers.front(),
                       numbers.back());
  }

  void start_learner() {
    if (in_progress_ || !batch_failure_.empty()) return;
    std::optional<std::vector<Group>> groups = scheduler_.take_batch();
    if (!groups) return;
    std::vector<Group> kept;
    if (options_.batch.program != nullptr) kept = *groups;
    try {
      timed(times_.prepare_batch, [&] {
        in_progress_ =
            prepare_batch(step_ + 1, std::move(*groups), ids_, options_.batch, events_.should_stop);
      });
    } catch (const Error& error) {
      // A program that was asked when the user stopped the run: a resumed run asks it again.
      if (!kept.empty() && events_.should_stop()) return scheduler_.give_back(std::move(kept));
      // The record of the step before may still have to be processed: the loop ends after that.
      batch_failure_ = fmt::format("step {}: {}", step_ + 1, error.what());
      return;
    }
    ++step_;
    scheduler_.note_filtered(in_progress_->filtered_rollouts);
    idle_ = clock_.now() - learner_idle_since_;
    in_progress_->learner.waited = std::exchange(sampled_while_idle_, 0.0);
    learner_.start(std::move(in_progress_->learner));
  }

  void sample() {
    // With nothing in flight, pump returns at once.
    double pumped = 0.0;
    const double waited_before = scheduler_.waited();
    timed(pumped, [&] { scheduler_.pump(kSamplingSlice); });
    const double waited = std::min(pumped, scheduler_.waited() - waited_before);
    times_.sample += pumped - waited;
    times_.wait_for_environments += waited;
    if (!in_progress_ && !checkpoint_due_) sampled_while_idle_ += pumped - waited;
    for (const RolloutFailure& failure : scheduler_.take_failures()) {
      if (events_.on_failure) events_.on_failure(failure);
    }
    if (events_.on_sampled) events_.on_sampled();
  }

  void finish_step(LearnerResult learned) {
    StepRecord record;
    record.step = step_;
    record.batch = std::move(*in_progress_);
    in_progress_.reset();
    record.batch.learner = std::move(learned.batch);
    record.learned = std::move(learned);
    learner_idle_since_ = clock_.now();
    scheduler_.offer_weights(record.learned.weights, record.learned.version);
    add_metrics(record);
    const bool last = step_ >= options_.max_steps || events_.should_stop();
    checkpoint_due_ = last || events_.wants_checkpoint(step_);
    // The learner starts before the record is processed.
    if (!checkpoint_due_) start_learner();
    timed(times_.report, [&] { events_.on_step(record); });
  }

  void add_metrics(StepRecord& record) {
    const double now = clock_.now(), seconds = std::max(now - last_step_, 1e-9);
    Metrics& out = record.metrics;
    out = record.batch.metrics;
    out.insert(out.end(), record.learned.metrics.begin(), record.learned.metrics.end());
    const ScheduleCounts counts = scheduler_.take_counts();
    const auto by_environment = [&](const std::string& name, const std::vector<int64_t>& values) {
      int64_t all = 0;
      for (int64_t value : values) all += value;
      out.emplace_back(name + "/all", static_cast<double>(all));
      for (size_t e = 0; e < values.size(); ++e) {
        out.emplace_back(name + "/" + ids_[e], static_cast<double>(values[e]));
      }
    };
    std::vector<int64_t> ended = counts.completed;
    for (size_t e = 0; e < ended.size(); ++e) ended[e] += counts.errored[e] + counts.empty[e];
    const auto with_rates = [&](const std::string& name, const std::vector<int64_t>& values) {
      by_environment(name, values);
      int64_t all = 0, all_ended = 0;
      const auto rate = [&](const std::string& id, int64_t part, int64_t whole) {
        const double share = static_cast<double>(part) / static_cast<double>(whole);
        out.emplace_back(name + "/" + id + "/rate", part == 0 ? 0.0 : share);
      };
      for (size_t e = 0; e < values.size(); ++e) {
        all += values[e];
        all_ended += ended[e];
        rate(ids_[e], values[e], ended[e]);
      }
      rate("all", all, all_ended);
    };
    with_rates("errored_rollouts", counts.errored);
    with_rates("empty_rollouts", counts.empty);
    by_environment("dropped_groups", counts.dropped_groups);
    by_environment("unasked_answers", counts.unasked_answers);
    const auto number = [&](const char* name, auto value) {
      out.emplace_back(name, static_cast<double>(value));
    };
    number("cancelled_rollouts/all", counts.cancelled_stale + counts.cancelled_dropped);
    number("cancelled_rollouts/stale", counts.cancelled_stale);
    number("cancelled_rollouts/dropped", counts.cancelled_dropped);
    for (const auto& [kind, count] : counts.failures) {
      out.emplace_back(std::string("failures/") + name_of(kind), static_cast<double>(count));
    }
    number("partial_groups", counts.partial_groups);
    number("quarantined_draws", counts.quarantined_draws);
    record.given_up = counts.given_up;
    record.last_failure = scheduler_.last_failure();
    const ScheduleTotals& totals = scheduler_.totals();
    number("account/admitted", totals.admitted);
    number("account/running", scheduler_.running());
    number("account/failed", totals.failed);
    number("account/cancelled", totals.cancelled);
    number("account/completed", totals.completed);
    number("account/trained", totals.batched - totals.filtered);
    number("account/filtered", totals.filtered);
    number("account/stale", totals.stale);
    number("account/dropped", totals.dropped);
    number("account/waiting", totals.completed - totals.batched - totals.stale - totals.dropped);
    number("progress/prompts", totals.groups_batched);
    number("progress/rollouts", totals.completed);
    number("progress/sampled_tokens", totals.sampled_tokens);
    number("perf/sampled_tokens_per_second",
           static_cast<double>(totals.sampled_tokens - sampled_before_) / seconds);
    number("perf/sampler_busy", std::min(1.0, times_.sample / seconds));
    number("perf/trainer_busy", std::min(1.0, record.learned.busy_seconds / seconds));
    number("time/wait_for_batch", idle_);
    number("time/sample", times_.sample);
    number("time/wait_for_environments", times_.wait_for_environments);
    number("time/prepare_batch", times_.prepare_batch);
    number("time/report", times_.report);
    number("time/checkpoint", times_.checkpoint);
    number("time/wait_for_trainer", times_.wait_for_trainer);
    number("time/other", std::max(0.0, seconds - times_.all()));
    number("time/step", seconds);
    number("time/elapsed", now - begin_);
    if (events_.more_metrics) {
      const Metrics more = events_.more_metrics();
      out.insert(out.end(), more.begin(), more.end());
    }
    sampled_before_ = totals.sampled_tokens;
    times_ = {};
    last_step_ = now;
  }

  RolloutScheduler& scheduler_;
  Learner& learner_;
  const Clock& clock_;
  const std::vector<std::string>& ids_;
  const LoopOptions& options_;
  const LoopEvents& events_;
  std::optional<PreparedBatch> in_progress_;
  double begin_, last_step_, learner_idle_since_;
  int64_t step_;
  int64_t saved_;  // the step of the last checkpoint
  bool checkpoint_due_ = false;
  std::string batch_failure_;        // why the next batch could not be made
  double idle_ = 0.0;                // seconds of the learner before its batch
  double sampled_while_idle_ = 0.0;  // of them, those of rollouts
  ThreadTimes times_;
  int64_t sampled_before_;  // tokens sampled before a resume
};

}  // namespace

LoopResult run_loop(RolloutScheduler& scheduler, Learner& learner, const Clock& clock,
                    const std::vector<std::string>& environment_ids, const LoopOptions& options,
                    const LoopEvents& events) {
  return Loop(scheduler, learner, clock, environment_ids, options, events).run();
}

}  // namespace leeway
