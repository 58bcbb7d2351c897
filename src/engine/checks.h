// What an engine can be made of, and which weights it takes.
#pragma once

#include "engine/engine.h"
#include "engine/request.h"
#include "model/model_config.h"

namespace leeway {

// What the engine's requests must keep to. Throws Error naming an option that is out of range.
RequestLimits limits_of(const ModelConfig& config, const EngineOptions& options);

// Throws Error for weights that are not of the network the engine was made for, naming the first
// key that differs.
void check_same_network(const ModelConfig& own, const ModelConfig& other);

}  // namespace leeway
