// For tests: ranks that are threads, with a sampling worker on each but the first.
#pragma once

#include <memory>
#include <vector>

#include "ranks/local_ranks.h"
#include "run/ranks_sampler.h"
#include "run/sampling_worker.h"

namespace leeway::testing {

class SamplingGroup {
 public:
  SamplingGroup(int size, const Parameters& like, const SamplingWorkerOptions& options)
      : ranks_(make_local_ranks(size)) {
    for (int rank = 1; rank < size; ++rank) {
      workers_.push_back(std::make_unique<SamplingWorker>(at(rank), like, options));
    }
  }
  ~SamplingGroup() {
    try {
      end_sampling(at(0));
    } catch (const Lost&) {  // the workers have ended by that
    }
    workers_.clear();
  }
  Ranks& at(int rank) { return *ranks_[static_cast<size_t>(rank)]; }

 private:
  std::vector<std::unique_ptr<Ranks>> ranks_;
  std::vector<std::unique_ptr<SamplingWorker>> workers_;
};

}  // namespace leeway::testing
