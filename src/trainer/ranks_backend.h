// The trainer's computations, shared by ranks. The leader (rank 0) has the trainer; its
// backend orders the others to compute their slots and takes part itself. On the CPU a step of
// S slots on N ranks has the bits of the same step on one: N must divide S.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "leeway/metric_list.h"
#include "ranks/ranks.h"
#include "trainer/rank_backend.h"

namespace leeway {

// Throws Error with the numbers that do unless this many ranks can share the steps of the run: on
// the CPU they divide its slots, on GPUs they are a power of two, at most kMostGpuRanks, and
// several where they share the weights.
inline constexpr int kMostGpuRanks = 64;
void check_ranks(int ranks, const RunConfig& run);

// Weights by version, from a rank's trainer for its sampler, which takes each version once, in
// order. All functions may be called from any thread.
class KeptSnapshots {
 public:
  void add(std::shared_ptr<const PolicySnapshot> snapshot);
  // Waits until it is there; older ones are dropped then. Null: it will not come, since a newer one
  // is there, or `end` was called.
  std::shared_ptr<const PolicySnapshot> take(PolicyVersion version);
  // Those of an earlier trainer.
  void clear();
  void end();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<const PolicySnapshot>> kept_;
  bool over_ = false;
};

// The leader's side. One backend at a time; everything else may be called from any thread.
class RanksTraining {
 public:
  // `specs`: the losses that trainers will use, the same on all ranks. All must outlive this.
  RanksTraining(Ranks& ranks, std::vector<const LossSpec*> specs,
                MakeRankBackend make = cpu_rank_backend());
  // Backends that must not outlive this.
  MakeTrainingBackend backends();
  // From here on other ranks keep the snapshots that the leader takes: for samplers that take every
  // one of them.
  void keep_snapshots();
  // The other ranks keep this version of the trainer at hand (KeptSnapshots). If they do, the
  // caller tells their samplers to take it, and older ones are gone.
  bool others_keep(PolicyVersion version);
  // Since the last call: time/ranks_collectives, seconds of sums over ranks and of handing weights
  // out; time/ranks_wait, the leader's seconds until others have computed their slots;
  // ranks/train_imbalance, the longest time of a rank's passes over the mean.
  Metrics take_metrics();
  // Once for each rank whose passes took more than kSlow times the mean of the others' in
  // kSlowSteps calls of `take_metrics` one after another: a line for the user. Empty: none.
  std::string take_warning();
  static constexpr double kSlow = 1.5;
  static constexpr int kSlowSteps = 10;
  // The others' `serve_training` returns.
  void end();

 private:
  friend class RanksBackend;
  void note_slow(double sum);
  bool keep(PolicyVersion version);  // whether others are told to
  Ranks& ranks_;
  const std::vector<const LossSpec*> specs_;
  const MakeRankBackend make_;
  mutable std::mutex mutex_;  // of what follows
  double collective_seconds_ = 0.0, wait_seconds_ = 0.0;
  std::vector<double> pass_seconds_;  // of each rank
  size_t slow_rank_ = 0;              // of the last steps
  int slow_steps_ = 0;
  std::set<size_t> told_;
  std::string warning_;
  bool keeps_ = false;
  std::set<PolicyVersion> kept_;
};

// The side of other ranks: serves the leader until it ends the group. `like`: the policy before
// training, for its shape and an adapter's base. Throws Lost, and what the backend throws, after
// telling the others.
struct ServeTraining {
  const Parameters* like = nullptr;
  std::vector<const LossSpec*> specs;
  int threads = 1;
  MakeRankBackend make = cpu_rank_backend();
};
void serve_training(Ranks& ranks, const ServeTraining& options, KeptSnapshots& snapshots);

}  // namespace leeway
