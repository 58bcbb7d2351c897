#include "run/background_evaluation.h"

#include <chrono>
#include <utility>

#include "leeway/error.h"

namespace leeway {

BackgroundEvaluation::~BackgroundEvaluation() {
  cancel();
  if (thread_.joinable()) thread_.join();
}

void BackgroundEvaluation::start(int64_t step, std::shared_ptr<const PolicySnapshot> weights,
                                 const EvalTable& table) {
  LEEWAY_CHECK(!thread_.joinable(), "one evaluation at a time");
  evaluation_ = {.step = step, .weights = std::move(weights), .result = {}};
  exception_ = nullptr;
  cancelled_ = false;
  ended_ = false;
  thread_ = std::thread([this, table] {
    try {
      EvaluationEvents events;
      events.should_stop = [this] { return cancelled_.load(); };
      evaluation_.result = evaluator_.evaluate(evaluation_.weights, table, events);
    } catch (...) {
      exception_ = std::current_exception();
    }
    const std::lock_guard lock(mutex_);
    ended_ = true;
    changed_.notify_all();
  });
}

std::optional<int64_t> BackgroundEvaluation::step() const {
  if (!thread_.joinable()) return std::nullopt;
  return evaluation_.step;
}

std::optional<EndedEvaluation> BackgroundEvaluation::take(double seconds) {
  if (!thread_.joinable()) return std::nullopt;
  {
    std::unique_lock lock(mutex_);
    const std::chrono::duration<double> most(seconds);
    if (!changed_.wait_for(lock, most, [&] { return ended_; })) return std::nullopt;
  }
  thread_.join();
  if (exception_) std::rethrow_exception(std::exchange(exception_, nullptr));
  return std::exchange(evaluation_, {});
}

}  // namespace leeway
