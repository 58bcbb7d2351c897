// One sampler for the two that use it in a run: training and evaluation.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "orchestrator/interfaces.h"

namespace leeway {

// Each user is a Sampler of its own that gets the results of its own requests only; results of the
// other that come meanwhile are kept for it. Both sample from the same weights. Used by one thread;
// what it is constructed with must outlive it.
class SharedSampler {
 public:
  // `version`: of the weights that the sampler has.
  SharedSampler(Sampler& sampler, PolicyVersion version, Clock& clock);

  Sampler& training() { return training_; }
  Sampler& evaluation() { return evaluation_; }
  PolicyVersion version() const { return version_; }

 private:
  class User : public Sampler {
   public:
    explicit User(SharedSampler& shared) : shared_(shared) {}
    int64_t submit(Request request) override;
    void cancel(int64_t request) override;
    std::vector<SampledSequence> poll(double seconds) override;
    void update_weights(std::shared_ptr<const PolicySnapshot> weights,
                        PolicyVersion version) override;

    // Keeps a result if it is of one of this user's requests.
    bool keep(SampledSequence& result);

   private:
    SharedSampler& shared_;
    std::map<int64_t, int64_t> open_;  // samples that are still to come, by request
    std::vector<SampledSequence> results_;
  };
  void collect(double seconds);

  Sampler& sampler_;
  PolicyVersion version_;
  Clock& clock_;
  User training_, evaluation_;
};

}  // namespace leeway
