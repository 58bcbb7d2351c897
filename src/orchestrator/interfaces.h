// What the orchestrator knows of the rest of the system: something that samples, something that
// learns, and a clock. The program adapts the engine and the trainer to these; tests bring fakes.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "text/trajectory.h"

namespace leeway {

// Weights of one version (model/policy_snapshot.h): the learner makes them, the sampler takes them,
// the orchestrator only hands them on.
class PolicySnapshot;

struct SampleRequest {
  std::vector<int32_t> prompt;
  int64_t samples = 1;
  int64_t max_new_tokens = 1;
  float temperature = 1.0f;  // 0: greedy
  std::vector<int32_t> stop_ids;
  uint64_t seed = 0;
  // Truncated sampling, for evaluation: 0, 1, 0 are off.
  int64_t top_k = 0;
  float top_p = 1.0f, min_p = 0.0f;
};

// How one sample of a request ended.
struct SampleResult {
  enum class Finish { stop, length, failed };
  int64_t request = 0;
  int64_t sample = 0;
  Finish finish = Finish::stop;
  std::vector<int32_t> ids;
  std::vector<float> logprobs;    // of the distribution drawn from
  std::vector<int32_t> versions;  // policy version of each token
  std::string failure;            // failed: the real message
};

// Used by one thread.
class Sampler {
 public:
  virtual ~Sampler() = default;
  // Returns at once. Each sample of the request gives exactly one result, unless it is cancelled.
  // Throws Error for a request that can never be served.
  virtual int64_t submit(const SampleRequest& request) = 0;
  // No further result of this request is returned.
  virtual void cancel(int64_t request) = 0;
  // Results since the last call. Works, or waits for others who do, for up to about `seconds` if
  // there is none yet; returns at once when nothing is in flight.
  virtual std::vector<SampleResult> poll(double seconds) = 0;
  // Tokens sampled from now on come from these weights.
  virtual void update_weights(std::shared_ptr<const PolicySnapshot> weights, int64_t version) = 0;
};

// One training sample with what the update needs beside it.
struct LearnerSample {
  TrainingSample sample;
  double advantage = 0.0;
  int32_t rollout_id = 0;  // number in the batch
  float temperature = 1.0f;
};

struct LearnerBatch {
  int64_t step = 0;  // 1, 2, ..
  std::vector<LearnerSample> samples;
};

// Names and numbers for metrics.jsonl, in the order they are written.
using MetricList = std::vector<std::pair<std::string, double>>;
// NaN if there is none of this name.
inline double metric_of(const MetricList& metrics, std::string_view name) {
  for (const auto& [key, value] : metrics) {
    if (key == name) return value;
  }
  return std::numeric_limits<double>::quiet_NaN();
}

struct LearnerResult {
  int64_t version = 0;                            // of `weights`: batches trained
  std::shared_ptr<const PolicySnapshot> weights;  // null after a failure
  MetricList metrics;
  double busy_seconds = 0.0;
  std::vector<std::vector<float>> logprobs;  // of the batch's samples, before the update
  // Those of the other policies as the loss read them; empty where it did not.
  std::vector<std::vector<float>> prox, ref, teacher;
  std::string failure;  // not empty: the update was not made; the last weights stand
};

// Used by one thread; the work itself may be done by another.
class Learner {
 public:
  virtual ~Learner() = default;
  // Begins an update; not while one is going on.
  virtual void start(LearnerBatch batch) = 0;
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
