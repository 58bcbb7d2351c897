// Evaluates in the background of training: one evaluation at a time, on its own thread.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "run/policy_evaluation.h"

namespace leeway {

struct EndedEvaluation {
  int64_t step = 0;
  std::shared_ptr<const PolicySnapshot> weights;  // that were evaluated
  EvaluationResult result;
};

// Used by one thread. The destructor cancels the evaluation in progress and waits for it.
class BackgroundEvaluation {
 public:
  // `evaluator` must outlive this, and must not be used elsewhere while an evaluation is in
  // progress.
  explicit BackgroundEvaluation(PolicyEvaluator& evaluator) : evaluator_(evaluator) {}
  ~BackgroundEvaluation();
  BackgroundEvaluation(const BackgroundEvaluation&) = delete;
  BackgroundEvaluation& operator=(const BackgroundEvaluation&) = delete;

  // Begins one; there must be none whose result was not taken.
  void start(int64_t step, std::shared_ptr<const PolicySnapshot> weights, const EvalTable& table);
  // The step of the evaluation that is in progress or whose result was not taken.
  std::optional<int64_t> step() const;
  // Its result, if it ends within `seconds`. What it threw is thrown again.
  std::optional<EndedEvaluation> take(double seconds = 0.0);
  // Asks the evaluation in progress to end; it then ends as stopped.
  void cancel() { cancelled_ = true; }

 private:
  PolicyEvaluator& evaluator_;
  std::thread thread_;
  std::atomic<bool> cancelled_ = false;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool ended_ = false;            // under the mutex
  EndedEvaluation evaluation_;    // belongs to the thread until it has ended
  std::exception_ptr exception_;  // likewise
};

}  // namespace leeway
