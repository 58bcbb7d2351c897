// The engine's passes on a torch device: the decoder in bf16 on CUDA, with its KV cache in device
// memory in the same type, and tokens drawn there. On the CPU device the same code runs on plain
// ATen, slowly, for tests.
//
// A pass copies its integers to the device once and waits for it once; the device writes tokens and
// logprobs into the host's memory. Draws with top-k, top-p or min-p, and rows that are not a
// distribution, are fetched as logits and drawn by TokenSampler. Logits are float32. In bf16 on
// CUDA a sample's bits do not depend on what else is in a pass, and its log-probabilities are the
// trainer's (docs/numerics.md). In float32, and on the CPU, products have an order of summation for
// each shape: there a seed repeats a whole run, but not a single sample in a different batch.
#pragma once

#include <torch/types.h>

#include "engine/backend.h"

namespace leeway {

struct TorchSamplingOptions {
  // Passes of only decode rows are padded to one of a few numbers of rows, and on CUDA captured as
  // a graph the second time that number occurs: a pass is then one launch instead of hundreds.
  bool graphs = true;
  // The layers' matrices and the rows they are multiplied with in fp8 (coded_operations.h), as
  // inference engines have them: `compute` is bfloat16, and the sizes of the model are as
  // engine/checks.h wants them. Embedding, head, attention and the KV cache stay in bf16.
  bool fp8 = false;
};

// For EngineOptions::backend. `compute`: float32 or bfloat16, the type of weights and KV cache;
// EngineOptions::precision is ignored. The backend throws Error if the build or the machine has no
// such device, if its memory does not suffice, or if its kernels do not support the model.
MakeSamplingBackend make_torch_sampling(torch::Device device, torch::ScalarType compute,
                                        TorchSamplingOptions options = {});

}  // namespace leeway
