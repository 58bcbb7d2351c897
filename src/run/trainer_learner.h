// The trainer as the orchestrator's learner, on its own thread.
#pragma once

#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>

#include "orchestrator/interfaces.h"
#include "trainer/trainer.h"

namespace leeway {

class TrainerLearner : public Learner {
 public:
  // `trainer` must outlive this object and must not be used elsewhere while an update goes on.
  // `version` batches of `trained_tokens` tokens were trained before.
  explicit TrainerLearner(Trainer& trainer, PolicyVersion version = 0, int64_t trained_tokens = 0);
  ~TrainerLearner() override;  // waits for the current update

  void start(TrainingBatch batch) override;
  std::optional<LearnerResult> poll(double seconds) override;
  int64_t trained_tokens() const { return trained_tokens_; }  // total; not during an update

 private:
  void work();

  Trainer& trainer_;
  PolicyVersion version_;
  int64_t trained_tokens_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<TrainingBatch> batch_;
  std::optional<LearnerResult> result_;
  bool stop_ = false;
  std::thread thread_;
};

// Metrics of an update under their names in metrics.jsonl.
Metrics metrics_of(const LossSpec& spec, const BatchResult& result);

}  // namespace leeway
