// The trainer's computations on the CPU, without torch.
#pragma once

#include "trainer/backend.h"
#include "trainer/gradient_update.h"

namespace leeway {

// trainer.gradient_slots where it is 0: four processes can share a step, and each slot of a usual
// batch still fills the cores.
inline constexpr int64_t kDefaultSlots = 4;
inline int64_t slots_of(const TrainerTable& table) {
  return table.gradient_slots > 0 ? table.gradient_slots : kDefaultSlots;
}

// `policy` outlives what is made.
using MakeGradientUpdate = std::function<std::unique_ptr<GradientUpdate>(Parameters& policy)>;

// Each call uses all of table.threads. `update`: empty for that of all parameters. Throws Error if
// there is no BLAS (numerics = "fast").
std::unique_ptr<TrainingBackend> make_cpu_training(TrainingWeights weights,
                                                   const TrainerTable& table,
                                                   const MakeGradientUpdate& update = {});

}  // namespace leeway
