// What the orchestrator knows of the rest of the system: something that samples, something that
// learns, and a clock. The program adapts the engine and the trainer to these; tests bring fakes.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "data/sample.h"
#include "data/sampling.h"
#include "leeway/metric_list.h"

namespace leeway {

// Weights of one version (model/policy_snapshot.h): the learner makes them, the sampler takes them,
// the orchestrator only hands them on.
class PolicySnapshot;

// Used by one thread.
class Sampler {
 public:
  virtual ~Sampler() = default;
  // Returns at once. Each sample of the request gives exactly one result (stop, length or failed),
  // unless it is cancelled.
  // Throws Error for a request that can never be served.
  virtual int64_t submit(Request request) = 0;
  // No further result of this request is returned.
  virtual void cancel(int64_t request) = 0;
  // Results since the last call. Works, or waits for others who do, for up to about `seconds` if
  // there is none yet; returns at once when nothing is in flight.
  virtual std::vector<SampledSequence> poll(double seconds) = 0;
  // Tokens sampled from now on come from these weights.
  virtual void update_weights(std::shared_ptr<const PolicySnapshot> weights,
                              PolicyVersion version) = 0;
};

struct LearnerResult {
  TrainingBatch batch;        // the one that `start` was given, also after a failure
  PolicyVersion version = 0;  // of `weights`: batches trained
  std::shared_ptr<const PolicySnapshot> weights;  // null after a failure
  Metrics metrics;
  double busy_seconds = 0.0;
  TokenValues logprobs;  // of the batch's samples, before the update
  // Those of the other policies as the loss read them; empty where it did not.
  TokenValues prox, ref, teacher;
  TokenFlags kept;      // of the batch's samples: the token's policy term carried gradient
  std::string failure;  // not empty: the update was not made; the last weights stand
};

// Used by one thread; the work itself may be done by another.
class Learner {
 public:
  virtual ~Learner() = default;
  // Begins an update; not while one is going on. The result gives the batch back.
  virtual void start(TrainingBatch batch) = 0;
  // The update's result, once, when it is there; waits for it for up to `seconds`.
  virtual std::optional<LearnerResult> poll(double seconds) = 0;
};

class Clock {
 public:
  virtual ~Clock() = default;
  virtual double now() const = 0;  // seconds, never falling
  virtual void sleep(double seconds) = 0;
};

}  // namespace leeway
