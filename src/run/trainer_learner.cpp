#include "run/trainer_learner.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>

#include "base/start_thread.h"
#include "leeway/error.h"
#include "run/failure.h"
#include "run/whole_batch_metrics.h"

namespace leeway {
namespace {

double ratio(double a, double b) { return b > 0 ? a / b : std::nan(""); }

class Stopwatch {
 public:
  double all() const { return seconds_since(begin_); }
  double lap() {  // since the last lap
    const double seconds = seconds_since(lap_);
    lap_ = Clock::now();
    return seconds;
  }

 private:
  using Clock = std::chrono::steady_clock;
  static double seconds_since(Clock::time_point begin) {
    return std::chrono::duration<double>(Clock::now() - begin).count();
  }
  Clock::time_point begin_ = Clock::now(), lap_ = begin_;
};

LearnerResult learn(Trainer& trainer, const TrainingBatch& batch, PolicyVersion version,
                    int64_t& trained_tokens) {
  Stopwatch watch;
  LearnerResult result;
  BatchResult trained = trainer.train_batch(batch.samples);
  if (!trained.failure.empty()) {
    result.failure = fmt::format("step {}: {}", batch.step, trained.failure);
    return result;
  }
  const double in_passes = trained.pass_seconds + trained.step_seconds + trained.prox_seconds +
                           trained.ref_seconds + trained.teacher_seconds;
  const double other = std::max(0.0, watch.lap() - in_passes);
  auto weights = trainer.snapshot(version);
  // Finite gradients can still produce weights that are not: a tiny epsilon divides by zero.
  if (const std::string bad = weights->not_finite_text(); !bad.empty()) {
    result.failure =
        fmt::format("step {}: the weights are not finite after the update: {}", batch.step, bad);
    return result;
  }
  const double snapshot = watch.lap();
  result.version = version;
  result.weights = std::move(weights);
  result.metrics = metrics_of(trainer.spec(), trained);
  result.prox =
      trained.streams.prox_is_pi ? trained.passes.logprobs : std::move(trained.streams.prox);
  result.ref = std::move(trained.streams.ref);
  result.teacher = std::move(trained.streams.teacher);
  result.logprobs = std::move(trained.passes.logprobs);
  result.kept = std::move(trained.passes.kept);
  for (auto& metric : whole_batch_metrics(trainer.spec(), batch.samples, result, result.metrics)) {
    result.metrics.push_back(std::move(metric));
  }
  result.metrics.emplace_back("time/snapshot", snapshot);
  result.metrics.emplace_back("time/train_other", other + watch.lap());
  result.busy_seconds = watch.all();
  result.metrics.emplace_back("time/train", result.busy_seconds);
  trained_tokens += trained.passes.tokens;
  result.metrics.emplace_back("progress/trained_tokens", static_cast<double>(trained_tokens));
  result.metrics.emplace_back(
      "perf/trained_tokens_per_second",
      ratio(static_cast<double>(trained.passes.tokens), result.busy_seconds));
  return result;
}

}  // namespace

Metrics metrics_of(const LossSpec& spec, const BatchResult& result) {
  Metrics out;
  const PassResult& passes = result.passes;
  out.emplace_back("loss", result.loss);
  out.emplace_back("entropy", ratio(passes.entropy, static_cast<double>(passes.trained_tokens)));
  out.emplace_back("grad_norm", result.grad_norm);
  out.emplace_back("learning_rate", result.learning_rate);
  for (const auto& [name, value] : finalize_metrics(
           spec, passes.metrics, true, spec.reads(Stream::ref), spec.reads(Stream::teacher))) {
    out.emplace_back(name == "mismatch_kl"       ? "mismatch_kl/all/mean"
                     : name == "mismatch_kl_max" ? "mismatch_kl/all/max"
                                                 : name,
                     value);
  }
  const auto number = [&](const char* name, auto value) {
    out.emplace_back(name, static_cast<double>(value));
  };
  number("batch/tokens", passes.tokens);
  number("batch/trained_tokens", passes.trained_tokens);
  number("batch/micro_batches", passes.micro_batches);
  number("batch/optimizer_steps", result.optimizer_steps);
  number("packing/efficiency",
         ratio(static_cast<double>(passes.tokens),
               static_cast<double>(passes.micro_batches * passes.largest_micro_batch)));
  number("time/forward_backward", result.pass_seconds);
  number("time/optim_step", result.step_seconds);
  number("time/prox_forward", result.prox_seconds);
  number("time/ref_forward", result.ref_seconds);
  number("time/teacher_forward", result.teacher_seconds);
  return out;
}

bool RoomForSampler::after(double trained, double waited) {
  // Far apart: beside a sampler the same update takes half as long again and more.
  constexpr double kTimeToSpare = 0.3, kNoTimeToSpare = 0.01;
  constexpr int kNeededToTake = 2, kMostNeeded = 1024;
  const double step = trained + waited, spare = ratio(waited, step);
  const bool wants_change =
      leaves_ ? spare < kNoTimeToSpare && step > step_without_ : spare > kTimeToSpare;
  agreeing_ = wants_change ? agreeing_ + 1 : 0;
  if (agreeing_ < (leaves_ ? kNeededToTake : needed_to_leave_)) return leaves_;
  agreeing_ = 0;
  if (leaves_) {
    needed_to_leave_ = std::min(kMostNeeded, 2 * needed_to_leave_);
  } else {
    step_without_ = step;
  }
  return leaves_ = !leaves_;
}

TrainerLearner::TrainerLearner(Trainer& trainer, PolicyVersion version, int64_t trained_tokens,
                               bool beside_sampler)
    : trainer_(trainer),
      version_(version),
      trained_tokens_(trained_tokens),
      steps_of_version_(trainer.optimizer_steps()),
      room_(beside_sampler ? std::optional<RoomForSampler>(RoomForSampler()) : std::nullopt),
      thread_(start_thread([this] { work(); })) {}

void TrainerLearner::end() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

std::optional<PolicyVersion> TrainerLearner::version() const {
  LEEWAY_CHECK(!thread_.joinable(), "the learner has ended");
  if (trainer_.optimizer_steps() != steps_of_version_) return std::nullopt;
  return version_;
}

void TrainerLearner::start(TrainingBatch batch) {
  const std::lock_guard lock(mutex_);
  LEEWAY_CHECK(!batch_ && !result_, "one update at a time");
  batch_ = std::move(batch);
  changed_.notify_all();
}

std::optional<LearnerResult> TrainerLearner::poll(double seconds) {
  std::unique_lock lock(mutex_);
  if (!result_ && seconds > 0.0) {
    changed_.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return bool(result_); });
  }
  return std::exchange(result_, std::nullopt);
}

void TrainerLearner::work() {
  std::unique_lock lock(mutex_);
  std::optional<double> trained;  // seconds of the update before
  bool leaves_room = false;
  while (true) {
    changed_.wait(lock, [&] { return stop_ || batch_; });
    if (stop_) return;
    TrainingBatch batch = std::move(*batch_);
    lock.unlock();
    LearnerResult result;
    try {
      if (room_ && trained) leaves_room = trainer_.leave_room(room_->after(*trained, batch.waited));
      result = learn(trainer_, batch, version_ + 1, trained_tokens_);
      if (room_) result.metrics.emplace_back("perf/trainer_leaves_room", leaves_room ? 1.0 : 0.0);
    } catch (...) {  // also a bug of ours: the run saves what it has learned before it ends
      result.failure =
          fmt::format("step {}: {}", batch.step, failure_of(std::current_exception()).message);
    }
    result.batch = std::move(batch);
    trained = result.busy_seconds;
    lock.lock();
    if (result.failure.empty()) {
      ++version_;
      steps_of_version_ = trainer_.optimizer_steps();
    }
    batch_.reset();
    result_ = std::move(result);
    changed_.notify_all();
  }
}

}  // namespace leeway
