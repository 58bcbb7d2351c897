// The trainer's computations on the CPU, without torch.
#pragma once

#include "trainer/backend.h"

namespace leeway {

// Each call uses all of table.threads. Throws Error if there is no BLAS (numerics = "fast").
std::unique_ptr<TrainingBackend> make_cpu_training(TrainingWeights weights,
                                                   const TrainerTable& table);

}  // namespace leeway
