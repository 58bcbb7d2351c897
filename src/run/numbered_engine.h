// The in-process engine under numbers of requests that others give, one pass at a time: what each
// of several ranks samples with.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "run/engine_sampler.h"

namespace leeway {

// Used by one thread.
class NumberedEngine {
 public:
  NumberedEngine(const PolicySnapshot& weights, const EngineOptions& options)
      : engine_(weights, options) {}

  // Throws Error for a request that can never be served.
  void check(const Request& request) const { engine_.check(request); }
  // The same, and for a number that is in flight.
  void submit(int64_t number, Request request);
  // No further result of it is returned; unknown or ended: nothing happens.
  void cancel(int64_t number);
  void update_weights(std::shared_ptr<const PolicySnapshot> weights);

  // One pass, unless there is nothing to do; what has ended since the last call, under the given
  // numbers. What fails has the reason in it.
  std::vector<SampledSequence> step();
  bool idle() const { return engine_.idle(); }
  Metrics take_metrics() { return engine_.take_metrics(); }

 private:
  struct Open {
    int64_t number;
    int64_t samples;  // that are still to come
  };
  EngineSampler engine_;
  std::unordered_map<int64_t, Open> open_;                // by the engine's number
  std::unordered_map<int64_t, int64_t> engines_numbers_;  // by the given one
};

}  // namespace leeway
