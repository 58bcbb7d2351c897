// The in-process engine as the orchestrator's sampler. Its passes run on the polling thread.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "orchestrator/interfaces.h"

namespace leeway {

class EngineSampler : public Sampler {
 public:
  EngineSampler(const PolicySnapshot& weights, const EngineOptions& options);

  int64_t submit(Request request) override;
  void cancel(int64_t request) override;
  std::vector<SampledSequence> poll(double seconds) override;
  // `weights` are of the engine's config and of this version.
  void update_weights(std::shared_ptr<const PolicySnapshot> weights,
                      PolicyVersion version) override;

  // Throws Error for a request that `submit` would refuse.
  void check(const Request& request) const { engine_.check(request); }
  bool idle() const { return engine_.idle(); }  // nothing in flight, no weights to take

  // time/load_weights: what new weights have taken since the last call, a part of time/sample.
  Metrics take_metrics();

 private:
  void take(std::vector<SampledSequence>& results, const std::string& failure);

  Engine engine_;
  double load_seconds_ = 0.0;
};

}  // namespace leeway
