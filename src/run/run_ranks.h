// The ranks of a run. Rank 0 has the run; the others compute what it orders, and know of the run
// what it tells them at the beginning: its configuration and the shape of its model.
#pragma once

#include <memory>
#include <optional>

#include "config/config.h"
#include "leeway/presets.h"
#include "model/policy_snapshot.h"
#include "orchestrator/interfaces.h"
#include "ranks/ranks.h"
#include "run/run_setup.h"
#include "trainer/ranks_backend.h"

namespace leeway {

// Cores that a rank may use where `local_size` ranks share a machine.
int cores_of_rank(int local_size);

// Rank 0's side.
class RunRanks {
 public:
  // `local_size`: ranks on this machine. `ranks` must outlive it.
  RunRanks(Ranks& ranks, int local_size) : ranks_(ranks), local_size_(local_size) {}
  // The others end.
  ~RunRanks();
  RunRanks(const RunRanks&) = delete;
  RunRanks& operator=(const RunRanks&) = delete;

  // Once, before what follows. Throws Error if ranks cannot share this run, with the remedy.
  void begin(const RunSetup& setup, const Catalog& catalog);

  bool has_begun() const { return training_ != nullptr; }
  int size() const { return ranks_.size(); }
  // "4 ranks share the run, 2 of them on this machine with 8 cores each"
  std::string line() const;
  int cores() const { return cores_of_rank(local_size_); }
  MakeTrainingBackend training_backend() { return training_->backends(); }
  // The engines of all ranks.
  std::unique_ptr<Sampler> make_sampler(const PolicySnapshot& weights,
                                        const EngineOptions& options);
  // Of training, since the last call (RanksTraining::take_metrics).
  Metrics take_metrics() { return training_->take_metrics(); }
  // A line for the user about a rank that all wait for; empty: none.
  std::string take_warning() { return training_->take_warning(); }

 private:
  Ranks& ranks_;
  const int local_size_;
  std::optional<LossSpec> loss_, supervised_;
  std::unique_ptr<RanksTraining> training_;  // null before `begin`
};

inline int64_t ranks_of(const RunRanks* ranks) { return ranks == nullptr ? 1 : ranks->size(); }

// The side of another rank: serves rank 0 until the run ends. Throws Lost if it ends otherwise, and
// Error for what is wrong here, after telling the others.
void serve_run(Ranks& ranks, int local_size, const Catalog& catalog);

}  // namespace leeway
