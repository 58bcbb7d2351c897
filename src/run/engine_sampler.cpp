#include "run/engine_sampler.h"

#include <chrono>
#include <utility>

#include "leeway/error.h"

namespace leeway {

EngineSampler::EngineSampler(const PolicySnapshot& weights, const EngineOptions& options)
    : engine_(weights, options) {}

int64_t EngineSampler::submit(Request request) { return engine_.submit(std::move(request)); }

// The engine still returns the samples of a cancelled request; the driver ignores them.
void EngineSampler::cancel(int64_t request) { engine_.cancel(request); }

std::vector<SampledSequence> EngineSampler::poll(double seconds) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  std::vector<SampledSequence> results;
  while (!engine_.idle()) {
    std::string failure;
    try {
      load_seconds_ += engine_.step().load_seconds;
    } catch (const Error& error) {
      failure = error.what();
    }
    take(results, failure);
    if (std::chrono::steady_clock::now() >= end) break;
  }
  take(results, "cancelled");
  return results;
}

void EngineSampler::take(std::vector<SampledSequence>& results, const std::string& failure) {
  for (SampledSequence& result : engine_.take_finished()) {
    if (result.finish == Finish::cancelled) {
      result.finish = Finish::failed;
      result.failure = failure;
    }
    results.push_back(std::move(result));
  }
}

void EngineSampler::update_weights(std::shared_ptr<const PolicySnapshot> weights,
                                   PolicyVersion version) {
  LEEWAY_CHECK(weights != nullptr && weights->version() == version, "weights of this version");
  engine_.update_weights(std::move(weights));
}

Metrics EngineSampler::take_metrics() {
  return {{"time/load_weights", std::exchange(load_seconds_, 0.0)}};
}

}  // namespace leeway
