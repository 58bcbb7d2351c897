// What an engine can be made of, and which weights it takes.
#pragma once

#include "engine/engine.h"
#include "engine/request.h"
#include "model/model_config.h"

namespace leeway {

// Throws Error naming an option that is out of range; what kv_bytes must be, block_count says.
void check_options(const EngineOptions& options);

// As many blocks as max_sequences of the model's greatest length can use.
int64_t most_blocks(const ModelConfig& config, const EngineOptions& options);

// Blocks of `block_bytes` that kv_bytes pays for, at most `most`. Throws Error if it is not one.
int64_t block_count(const EngineOptions& options, int64_t block_bytes, int64_t most);

// What the requests of an engine with this backend must keep to.
RequestLimits limits_of(const ModelConfig& config, const EngineOptions& options,
                        const SamplingBackend& backend);

// Throws Error for weights that are not of the network the engine was made for, naming the first
// key that differs.
void check_same_network(const ModelConfig& own, const ModelConfig& other);

}  // namespace leeway
