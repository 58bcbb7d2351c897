// The engines of all ranks as the orchestrator's sampler, on rank 0.
//
// Each request goes as it is to the rank that has the fewest samples in flight, the lowest of
// equals. Engines keep nothing of a prompt when its request has ended, so that any of them is as
// good as another. On the CPU a sample's bits depend neither on the engine nor on what is sampled
// beside it: the results are those of one engine.
//
// This rank's engine runs on the polling thread, between looks at what other ranks report.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <unordered_map>
#include <vector>

#include "model/policy_snapshot.h"
#include "orchestrator/interfaces.h"
#include "ranks/ranks.h"
#include "run/numbered_engine.h"
#include "run/sampling_link.h"

namespace leeway {

struct RanksSamplerOptions {
  EngineOptions engine;  // of this rank
  // Whether all other ranks have weights of this version, or make them without being told to
  // (SamplingWorkerOptions::snapshot): then the version alone is sent. Empty: none are there.
  std::function<bool(PolicyVersion)> known;
};

// Several may follow one another on the same ranks; at any time there is one at most. Every call
// throws Lost when a rank is lost, and Error with what failed on another rank.
class RanksSampler : public Sampler {
 public:
  // All other ranks have a SamplingWorker. `ranks` must outlive this.
  RanksSampler(Ranks& ranks, const PolicySnapshot& weights, RanksSamplerOptions options);

  // Refuses what this rank's engine refuses. Others get it with the next `poll`.
  int64_t submit(Request request) override;
  void cancel(int64_t request) override;
  // Returns before `seconds` have passed if a rank has reported results, which may wait for work.
  std::vector<SampledSequence> poll(double seconds) override;
  // `weights` are of the engines' config and of this version.
  void update_weights(std::shared_ptr<const PolicySnapshot> weights,
                      PolicyVersion version) override;

  // Since the last call: ranks/requests/R and ranks/sampled_tokens/R of each rank R, in sequences
  // that have ended; ranks/sampling_imbalance, the largest of the latter over their mean (1 if
  // there are none); and time/load_weights of this rank.
  Metrics take_metrics();

 private:
  struct Open {
    int rank;
    int64_t samples;  // that are still to come
  };
  struct Rank {
    int64_t load = 0;  // samples in flight
    int64_t requests = 0, sampled_tokens = 0;
  };
  void keep(int rank, std::vector<SampledSequence> results, std::vector<SampledSequence>& kept);

  const RanksSamplerOptions options_;
  SamplingLink link_;  // before the engine: others make theirs at the same time
  NumberedEngine engine_;
  std::vector<Rank> ranks_;
  std::unordered_map<int64_t, Open> open_;  // by request
  int64_t next_ = 0;
};

// Tells all sampling workers that they end, when no sampler will follow; by rank 0.
void end_sampling(Ranks& ranks);

}  // namespace leeway
