// Checks of an engine's options and of the weights it is given.
#pragma once

#include "engine/engine.h"
#include "engine/request.h"
#include "model/model_config.h"

namespace leeway {

// Throws Error naming an option that is out of range; block_count checks kv_bytes.
void check_options(const EngineOptions& options);

// As many blocks as max_sequences sequences of the model's maximum length can use.
int64_t most_blocks(const ModelConfig& config, const EngineOptions& options);

// The number of blocks of `block_bytes` that fit in kv_bytes, at most `most`. Throws Error if not
// even one fits.
int64_t block_count(const EngineOptions& options, int64_t block_bytes, int64_t most);

// Limits for the requests of an engine with this backend.
RequestLimits limits_of(const ModelConfig& config, const EngineOptions& options,
                        const SamplingBackend& backend);

// Throws Error for weights of a different network than the engine was made for, naming the first
// key that differs.
void check_same_network(const ModelConfig& own, const ModelConfig& other);

// Throws Error for a model that cannot be sampled in fp8: products of codes take inputs and outputs
// that are multiples of 16.
void check_sizes_for_fp8(const ModelConfig& config);

}  // namespace leeway
