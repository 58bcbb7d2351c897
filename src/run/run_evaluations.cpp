#include "run/run_evaluations.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

#include "base/files.h"
#include "leeway/error.h"
#include "model/adapter_io.h"

namespace leeway {
namespace {

constexpr double kWaitSlice = 0.02;  // seconds between two looks at the stop condition

}  // namespace

RunEvaluations::RunEvaluations(const EvaluationPlace& place)
    : place_(place), run_(place.setup.config.run), background_(place.evaluator) {}

void RunEvaluations::restore(const Metrics& before) {
  before_ = before;
  if (auto evaluation = last_evaluation(place_.files.folder())) {
    last_step_ = evaluation->first;
    if (last_step_ > 0) after_ = std::move(evaluation->second);
  }
}

bool RunEvaluations::due(int64_t step) const {
  return run_.eval.every > 0 && step % run_.eval.every == 0;
}

std::vector<int64_t> RunEvaluations::missing(int64_t step) const {
  std::vector<int64_t> steps;
  const auto look_at = [&](int64_t at) {
    const std::string weights = weights_folder(place_.files.folder(), at);
    if (at == step || is_complete_folder(weights)) steps.push_back(at);
  };
  if (before_.empty()) look_at(0);
  if (run_.eval.every <= 0) return steps;
  const int64_t written = std::max<int64_t>(0, last_step_);
  for (int64_t at = (written / run_.eval.every + 1) * run_.eval.every; at <= step;
       at += run_.eval.every) {
    look_at(at);
  }
  return steps;
}

bool RunEvaluations::runs_beside(int64_t step) const {
  return run_.orchestrator.schedule == RolloutSchedule::free && step < run_.trainer.max_steps &&
         !place_.evaluator.has_servers();
}

void RunEvaluations::evaluate_step(int64_t step, std::shared_ptr<const PolicySnapshot> weights) {
  if (!place_.evaluator.has_servers()) return evaluate(step, std::move(weights));
  waiting_.emplace_back(step, std::move(weights));
  evaluate_served();
}

void RunEvaluations::evaluate_served() {
  if (waiting_.empty() || waiting_.front().second->version() != place_.evaluator.served_version()) {
    return;
  }
  const auto [step, weights] = std::move(waiting_.front());
  waiting_.pop_front();
  evaluate(step, weights);
}

void RunEvaluations::evaluate(int64_t step, std::shared_ptr<const PolicySnapshot> weights) {
  finish();
  if (runs_beside(step)) return background_.start(step, std::move(weights), run_.eval);
  EvaluationEvents events;
  events.should_stop = [&] {
    if (beside_) beside_();
    return place_.should_stop();
  };
  events.on_rollouts = [&](size_t done, size_t total) {
    place_.progress.count("eval", "rollouts", done, total);
  };
  events.on_first_failure = [&](const std::string& line) { place_.progress.note(line); };
  EndedEvaluation ended{.step = step, .weights = weights, .result = {}};
  ended.result = place_.evaluator.evaluate(weights, run_.eval, events);
  blocked_seconds_ += ended.result.seconds;
  take(std::move(ended));
}

void RunEvaluations::collect() {
  if (auto ended = background_.take()) take(std::move(*ended));
}

void RunEvaluations::finish() {
  const auto begin = std::chrono::steady_clock::now();
  std::optional<EndedEvaluation> ended;
  while (background_.step() && !ended) {
    if (place_.should_stop()) cancel();
    ended = background_.take(kWaitSlice);
  }
  if (!ended) return;
  const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - begin;
  blocked_seconds_ += waited.count();
  take(std::move(*ended));
}

void RunEvaluations::settle(int64_t step) {
  background_.step().value_or(step) < step ? finish() : collect();
  for (const EndedEvaluation& stopped : stopped_) {
    if (stopped.step >= step) continue;
    try {
      place_.files.save_weights(stopped.weights->host(), stopped.step, place_.setup,
                                stopped.weights->is_rounded());
    } catch (const Error& error) {
      place_.progress.note(
          fmt::format("warning: the evaluation of step {} cannot be made later: {}", stopped.step,
                      error.what()));
    }
  }
  std::erase_if(stopped_, [&](const EndedEvaluation& stopped) { return stopped.step < step; });
}

void RunEvaluations::take(EndedEvaluation ended) {
  const EvaluationResult& result = ended.result;
  seconds_ += result.seconds;
  place_.progress.evaluated(ended.step, result);
  if (result.stopped) return stopped_.push_back(std::move(ended));
  last_step_ = ended.step;
  (ended.step == 0 ? before_ : after_) = result.metrics;
  place_.files.write_eval(ended.step, result.metrics);
  if (ended.step == 0) return;
  for (const std::string& line :
       place_.warnings.on_evaluation(ended.step, before_, result.metrics)) {
    place_.progress.note(line);
  }
}

}  // namespace leeway
