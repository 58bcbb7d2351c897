// The trainer's computations on a torch device: weights and AdamW moments in float32, or those of
// an adapter alone (policy_network.h), passes in bf16 on CUDA by the trunk (trunk.h), others by
// TorchDecoder and autograd, the head and the loss by tensor_head.h.
#pragma once

#include <torch/types.h>

#include "model/policy_snapshot.h"
#include "torch/device_group.h"
#include "trainer/rank_backend.h"

namespace leeway {

// `compute`: float32 or bfloat16. table.threads is used by the head on the CPU; table.numerics is
// ignored. Where there is no trunk, Recompute::selective is as Recompute::layer. A micro-batch
// waits for the device once, when its numbers are fetched; with an entropy bonus, or a correction
// that is a function, twice. On CUDA the gradient of attention is summed in no fixed order, so a
// step repeats only up to rounding. The backend's calls also throw Error if the device's memory
// does not suffice. Where the device has no room for a copy of the weights in float32, a snapshot
// is rounded to what passes read, or goes through the host (device_room.h).
std::unique_ptr<TrainingBackend> make_torch_training(TrainingWeights weights,
                                                     const TrainerTable& table,
                                                     torch::Device device,
                                                     torch::ScalarType compute,
                                                     SnapshotUse snapshots = {});

// The same for one of several ranks, whose devices `group` joins: weights that passes read and
// gradients are whole on each, moments and what the float32 weights have beside the former are
// there for the rank's part alone. Sums over ranks have no fixed order. A power of two of them, at
// most FlatLayout::kMostRanks.
RankBackend make_torch_rank(Ranks& ranks, std::unique_ptr<DeviceGroup> group,
                            TrainingWeights weights, const TrainerTable& table,
                            torch::Device device, torch::ScalarType compute);

}  // namespace leeway
