// The backend of one rank of a group: it computes its slots of a step, has a part of the gradients'
// sum and of the update, and hands the new weights of its part to the others. ranks_backend.h puts
// those of all ranks together.
#pragma once

#include <functional>
#include <memory>

#include "ranks/ranks.h"
#include "trainer/backend.h"
#include "trainer/state_shard.h"

namespace leeway {

// What a rank has to do with the others'.
class RankShare {
 public:
  virtual ~RankShare() = default;
  // Seconds in calls that wait for other ranks, since the last question.
  virtual double take_seconds() = 0;
  // This rank's part of weights and moments.
  virtual StateShard& shard() = 0;
  // Rank 0: whether it needs the others for the weights as they are now, of which it has but a part
  // in float32. While it calls TrainingBackend::parameters or `snapshot`, the others bring theirs
  // then.
  virtual bool needs_weights() const = 0;
  virtual void bring_weights() = 0;
  // Around the micro-batches of one order, on all ranks: `own` are this rank's, `most` those of the
  // rank that has most. Where ranks need each other within a pass, the end makes up for passes that
  // this rank does not have, and for those that a failure has kept it from.
  virtual void begin_passes(const SlotPass& pass, int64_t own, int64_t most) = 0;
  virtual void end_passes() = 0;
  // Rank 0, while the others take a snapshot for their samplers: gives its part.
  virtual void bring_snapshot() = 0;
};

// Its functions that change or add up anything are called on all ranks at once; `load` with the
// folder on rank 0 alone.
struct RankBackend {
  std::unique_ptr<TrainingBackend> backend;
  RankShare* share = nullptr;  // a part of the backend
};

// Called on all ranks at once. `ranks` must outlive the backend. Where weights are in parts those
// of rank 0 count, and others' may be without numbers.
using MakeRankBackend =
    std::function<RankBackend(Ranks& ranks, TrainingWeights weights, const TrainerTable& table)>;

// On the CPU: the same bits for any number of ranks.
MakeRankBackend cpu_rank_backend();

}  // namespace leeway
