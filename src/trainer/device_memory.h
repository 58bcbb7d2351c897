// What a run needs of a GPU's memory, computed from its settings before anything is allocated, and
// what to change where it does not fit. The formulas follow src/torch (torch_training.cpp,
// trunk.cpp, torch_sampling.cpp); `gpu_memory_table` sets them beside what is measured.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "config/run_config.h"
#include "model/lora.h"
#include "model/model_config.h"

namespace leeway {

// An engine of this process, as EngineOptions (engine/engine.h).
struct SamplerMemoryUse {
  int64_t engines = 0;                                    // 0: others sample
  int64_t fp8_engines = 0;                                // of them
  int64_t kv_bytes = 0, max_sequences = 0, max_rows = 0;  // of each
  bool in_process = true;        // with the model below an adapter that the trainer has
  bool measures_reward = false;  // of supervised training (sft.stop_at_reward), and nothing else
};

struct DeviceMemoryUse {
  ModelConfig model;
  // An adapter over the model is trained: the model is there once, for all, in the type of passes.
  std::optional<LoraSettings> lora;
  // Passes in bf16. In float32, or where the trunk has no kernels, activations are a lower bound.
  bool half = true;
  int64_t max_tokens = 0;  // of the largest micro-batch
  Recompute recompute = Recompute::off;
  OptimizerState optimizer_state = OptimizerState::float32;
  // Reference and teacher; those that are the shared model with or without an adapter are not
  // counted.
  std::vector<ModelConfig> other_policies;
  // That share the update: each has a part of masters and moments; or of all weights and gradients,
  // those of other policies too.
  int64_t ranks = 1;
  Sharding sharding = Sharding::optimizer;
  SamplerMemoryUse sampler;
};

// Bytes.
struct DeviceMemory {
  int64_t weights = 0;  // float32, of which passes in bf16 read a half; below an adapter that half
  int64_t gradients = 0;  // float32
  int64_t moments = 0;    // of AdamW
  int64_t gathered = 0;   // of weights in parts, what passes bring together and its gradients
  int64_t other_policies = 0;
  int64_t activations = 0;  // kept between forward and backward pass
  int64_t workspace = 0;    // the most that is needed beside them: by the head or by a layer
  int64_t sampler = 0;      // weights, KV cache and a pass of every engine
  int64_t libraries = 0;    // workspaces and code of CUDA's libraries

  int64_t total() const {
    return weights + gradients + moments + gathered + other_policies + activations + workspace +
           sampler + libraries;
  }
};

DeviceMemory device_memory(const DeviceMemoryUse& use);

// Empty if `use` fits into `free` bytes. Otherwise what it needs, part by part, and settings that
// fit: the first ones cost the least time.
std::string why_it_does_not_fit(const DeviceMemoryUse& use, int64_t free);

}  // namespace leeway
