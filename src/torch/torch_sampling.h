// The engine's passes on a torch device: the decoder in bf16 on CUDA, keys and values in its memory
// in the same type, tokens drawn there. On the CPU device the same code runs on plain ATen, slowly:
// for tests.
//
// A pass copies its integers to the device once, waits for it once, and fetches tokens and
// log-probabilities together. Draws with top-k, top-p or min-p, and rows that are no distribution,
// are fetched as logits and drawn by TokenSampler. Logits are float32. A sample's last bits depend
// on what else is in a pass (products of matrices have an order of summation for each shape), so
// that a seed repeats a run but not a sample in other company.
#pragma once

#include <torch/types.h>

#include "engine/backend.h"

namespace leeway {

struct TorchSamplingOptions {
  // Passes of decode rows alone are filled up to one of a few numbers of rows, and on CUDA captured
  // as a graph the second time that number comes: a pass is then one launch instead of hundreds.
  bool graphs = true;
};

// For EngineOptions::backend. `compute`: float32 or bfloat16, the type of weights, keys and values;
// EngineOptions::precision is not looked at. The backend throws Error where the build or the
// machine has no such device, its memory does not suffice, or its kernels do not take the model.
MakeSamplingBackend make_torch_sampling(torch::Device device, torch::ScalarType compute,
                                        TorchSamplingOptions options = {});

}  // namespace leeway
