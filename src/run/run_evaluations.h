// The evaluations of one run: when they block and when they run in the background of training, and
// where their results go.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "run/background_evaluation.h"
#include "run/policy_evaluation.h"
#include "run/progress.h"
#include "run/run_files.h"
#include "run/run_warnings.h"

namespace leeway {

// What the evaluations of a run work with; all of it must outlive them.
struct EvaluationPlace {
  const RunSetup& setup;
  RunFiles& files;
  Progress& progress;
  const StopCondition& should_stop;
  RunWarnings& warnings;
  PolicyEvaluator& evaluator;
};

// In the schedule "free" an evaluation runs beside the loop, on the weights of its step; the loop
// waits only if the one before has not ended. In "lockstep", where files and messages have one
// order, and after the last step, when nothing else is to be done, it blocks.
//
// Servers have one version of the weights at a time. An evaluation that they sample begins when
// they have the weights of its step, and the loop waits until it has ended; the learner does not.
//
// Results are written to eval.jsonl in the order of their steps. One that was stopped is made when
// the run is resumed: from the checkpoint's weights if it is of that step, else from weights that
// `settle` kept for it. Used by one thread.
class RunEvaluations {
 public:
  explicit RunEvaluations(const EvaluationPlace& place);

  // Takes over what was evaluated before a resume.
  void restore(const Metrics& before);
  // Of a run that is resumed at step `step`: the evaluations up to there that were not written and
  // can be made, of `step` itself and of steps with a folder of weights.
  std::vector<int64_t> missing(int64_t step) const;
  // Whether [eval] wants one after this step.
  bool due(int64_t step) const;

  // Evaluates the policy of a step. Nothing of an evaluation that is stopped is written.
  void evaluate(int64_t step, std::shared_ptr<const PolicySnapshot> weights);
  // The same for a step of the loop: with servers, when they have its weights.
  void evaluate_step(int64_t step, std::shared_ptr<const PolicySnapshot> weights);
  // Makes the evaluation that has waited for the weights that the servers have now.
  void evaluate_served();
  // What is done now and then while servers sample for an evaluation; may be empty.
  void set_beside(std::function<void()> beside) { beside_ = std::move(beside); }
  // Takes the result of an evaluation that has ended meanwhile.
  void collect();
  // Before a checkpoint of step `step`: waits for an evaluation of an earlier step, which a run
  // that goes on from the checkpoint could not make, and keeps the weights of one that was stopped.
  void settle(int64_t step);
  // Waits for the current evaluation.
  void finish();
  // Stops the current evaluation.
  void cancel() { background_.cancel(); }

  int64_t last_step() const { return last_step_; }  // that was evaluated; -1: none
  const Metrics& before() const { return before_; }
  const Metrics& after() const { return after_; }
  double seconds() const { return seconds_; }
  double blocked_seconds() const { return blocked_seconds_; }  // in which nothing else was done

 private:
  bool runs_beside(int64_t step) const;
  void take(EndedEvaluation ended);

  EvaluationPlace place_;
  const RunConfig& run_;
  BackgroundEvaluation background_;
  std::function<void()> beside_;
  // Steps whose weights the servers do not have yet.
  std::deque<std::pair<int64_t, std::shared_ptr<const PolicySnapshot>>> waiting_;
  std::vector<EndedEvaluation> stopped_;  // whose weights no checkpoint has yet
  int64_t last_step_ = -1;
  Metrics before_, after_;
  double seconds_ = 0.0, blocked_seconds_ = 0.0;
};

}  // namespace leeway
