// Runs the passes of an engine: a decoder with its weights and KV cache on some device, and the
// drawing of tokens from its logits. The engine plans passes and is independent of the device.
//
// Everything here but `check` is called by one thread, the one that steps the engine.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "engine/scheduler.h"
#include "model/policy_snapshot.h"

namespace leeway {

struct EngineOptions;

class SamplingBackend {
 public:
  virtual ~SamplingBackend() = default;

  // The number of KV-cache blocks that fit in memory, and the size of one in all layers.
  virtual int64_t blocks() const = 0;
  virtual int64_t block_bytes() const = 0;

  // Throws Error for weights of the backend's config that `load` does not take. From any thread.
  virtual void check(const PolicySnapshot&) const {}
  // Copies the weights, from the device's memory where they are there already; called before the
  // first pass and then between passes. They are of the config the backend was made for. The
  // snapshot may go when this returns.
  virtual void load(const PolicySnapshot& weights) = 0;
  // One pass: forward over all rows, with keys and values written to the blocks, then one token per
  // draw; drawn[i] belongs to pass.draws[i]. Takes one number from each draw's random stream. A row
  // that is not a distribution is a failure of its draws, not an exception.
  virtual void run(const StepRows& pass, std::vector<Drawn>& drawn) = 0;
  // Called before the next pass, in order.
  virtual void copy_blocks(std::span<const BlockCopy> copies) = 0;
};

// Makes a backend with as many blocks as options.kv_bytes allows, at most `most_blocks` (see
// block_count in checks.h). The options have been checked. Throws Error if the device or its memory
// is not available.
using MakeSamplingBackend = std::function<std::unique_ptr<SamplingBackend>(
    const ModelConfig& config, const EngineOptions& options, int64_t most_blocks)>;

}  // namespace leeway
