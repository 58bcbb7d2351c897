// The trainer's computations on the CPU, shared by ranks. The leader (rank 0) has the trainer; its
// backend orders the others to compute their slots and takes part itself. A step of S slots on N
// ranks has the bits of the same step on one: N must divide S.
#pragma once

#include <functional>
#include <memory>
#include <span>

#include "leeway/metric_list.h"
#include "ranks/ranks.h"
#include "trainer/backend.h"

namespace leeway {

// Throws Error with the numbers that do unless `ranks` divides the slots of the table.
void check_ranks(int ranks, const TrainerTable& table);

// What the group did, for metrics; one object for all backends of a run. Read by the trainer's
// thread.
struct RanksTimes {
  double collective_seconds = 0.0;   // in sums over ranks and in handing weights out
  double wait_seconds = 0.0;         // the leader's, for results of others
  std::vector<double> pass_seconds;  // of each rank
  // Since the last call: time/ranks_collectives, time/ranks_wait, ranks/imbalance.
  Metrics take();
};

// Backends of rank 0. `specs`: the losses that trainers will use, the same on all ranks. `ranks`
// and `times` must outlive what is made; one backend at a time.
MakeTrainingBackend ranks_training(Ranks& ranks, std::vector<const LossSpec*> specs,
                                   RanksTimes& times);

// Serves the leader until it ends the group. `like`: the policy before training, for its shape and
// an adapter's base. `on_snapshot` gets the weights of each version that the leader takes. Throws
// Lost, and what the backend throws, after telling the others.
void serve_training(Ranks& ranks, const Parameters& like, std::vector<const LossSpec*> specs,
                    int threads,
                    const std::function<void(std::shared_ptr<const PolicySnapshot>)>& on_snapshot);
// Ends the group's `serve_training`.
void end_training(Ranks& ranks);

}  // namespace leeway
