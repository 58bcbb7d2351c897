// The engine's passes on the CPU: the native decoder, whose bits do not depend on what else is in a
// pass, with options.threads threads and in options.precision.
#pragma once

#include <cstdint>
#include <memory>

#include "engine/backend.h"

namespace leeway {

// A MakeSamplingBackend.
std::unique_ptr<SamplingBackend> make_cpu_backend(const ModelConfig& config,
                                                  const EngineOptions& options,
                                                  int64_t most_blocks);

}  // namespace leeway
