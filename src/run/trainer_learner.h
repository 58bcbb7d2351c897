// The trainer as the orchestrator's learner, on its own thread.
#pragma once

#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>

#include "orchestrator/interfaces.h"
#include "trainer/trainer.h"

namespace leeway {

// Whether a trainer that shares its device with the sampler leaves room to it. Whoever takes longer
// decides how long a step takes: a trainer that waits for its batches has time to spare. Once it
// never waits and a step takes longer than without room, it takes the room back, and needs more
// updates to leave it again: what suits neither way must not change for ever.
class RoomForSampler {
 public:
  // After an update: the seconds that it took, and those for which its batch was waited for.
  // Returns whether the next one leaves room.
  bool after(double trained, double waited);

 private:
  bool leaves_ = false;
  int agreeing_ = 0;           // updates in a row after which a change was wanted
  int needed_to_leave_ = 2;    // of them
  double step_without_ = 0.0;  // seconds of the last step before room was left
};

class TrainerLearner : public Learner {
 public:
  // `trainer` must outlive this object and must not be used elsewhere while an update goes on.
  // `version` batches of `trained_tokens` tokens were trained before. `beside_sampler`: rollouts
  // are sampled on the trainer's device meanwhile.
  explicit TrainerLearner(Trainer& trainer, PolicyVersion version = 0, int64_t trained_tokens = 0,
                          bool beside_sampler = false);
  ~TrainerLearner() override { end(); }

  void start(TrainingBatch batch) override;
  std::optional<LearnerResult> poll(double seconds) override;
  int64_t trained_tokens() const { return trained_tokens_; }  // total; not during an update

  // Waits for the current update; there is no other after it.
  void end();
  // The version that the trainer's weights are of; none where an update that failed changed them.
  // After `end`.
  std::optional<PolicyVersion> version() const;

 private:
  void work();

  Trainer& trainer_;
  PolicyVersion version_;
  int64_t trained_tokens_;
  int64_t steps_of_version_;            // optimizer steps that led to it
  std::optional<RoomForSampler> room_;  // where rollouts are sampled beside training
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
