// What samples for a training run: the engine in this process, the engines of all its ranks, or
// servers. The latter two also sample for its evaluations.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "orchestrator/interfaces.h"
#include "run/progress.h"
#include "run/run_files.h"
#include "run/run_setup.h"
#include "run/shared_sampler.h"

namespace leeway {

// Throws Error unless the run's servers can be used: the program can speak to servers, the variable
// with their key is set, and one of them answers with the right model within ready_timeout. Does
// nothing for a run that samples in process or starts its own servers.
void check_servers(const RunSetup& setup);

// Used by one thread. Everything it is constructed with must outlive it.
class RunSampler {
 public:
  // `threads`: of the engine, where rollout.threads is 0. Waits until a server can take requests.
  // Throws Error if none can.
  RunSampler(const RunSetup& setup, std::shared_ptr<const PolicySnapshot> weights, int threads,
             RunFiles& files, Progress& progress, const StopCondition& should_stop, Clock& clock);
  ~RunSampler();

  Sampler& sampler() { return shared_ ? shared_->training() : *sampler_; }
  // The servers or ranks, for training and evaluation; null where evaluation has an engine of its
  // own: in one process, and with ranks whose rollouts are of a precision that an evaluation's are
  // not.
  SharedSampler* servers() { return shared_.get(); }
  // Of whatever samples, since the last call.
  Metrics take_metrics();
  // Writes what happened to servers since the last call: servers.jsonl, and notes.
  void tell();

 private:
  void sample_in_process(const PolicySnapshot& weights, int threads, Clock& clock);

  const RunSetup& setup_;
  RunFiles& files_;
  Progress& progress_;
  std::string children_model_;  // folder that started servers begin with; empty: none are
  std::unique_ptr<Sampler> sampler_;
  std::unique_ptr<SharedSampler> shared_;
};

}  // namespace leeway
