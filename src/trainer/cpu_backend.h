// The trainer's numbers on the CPU, torch-free.
#pragma once

#include "trainer/backend.h"

namespace leeway {

// Each call uses all of table.threads. Throws Error for a BLAS that is not there (numerics =
// "fast").
std::unique_ptr<TrainingBackend> make_cpu_training(TrainingWeights weights,
                                                   const TrainerTable& table);

}  // namespace leeway
