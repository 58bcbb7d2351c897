// What trainer and engine compute with on the GPU, for those who see no torch: src/cli.
#pragma once

#include <string>

#include "engine/backend.h"
#include "trainer/backend.h"

namespace leeway {

// Why nothing can be computed on a GPU here, in words; empty: it can.
std::string why_no_cuda();

// On the first GPU; `half`: passes in bf16, else in float32.
MakeTrainingBackend cuda_training(bool half);
MakeSamplingBackend cuda_sampling(bool half);

}  // namespace leeway
