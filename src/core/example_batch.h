// A built-in batch for commands that are called without one.
#pragma once

#include <cstdint>

#include "leeway/loss.h"

namespace leeway {

// A made-up batch that resembles a stale, quantized rollout: group-centred advantages, masked
// prompt tokens, small numeric noise on every token, drift that grows with the policy's age, and a
// few outliers. The same seed gives the same batch on every platform. All streams are present.
Batch example_batch(int sequences, int mean_length, uint64_t seed);

}  // namespace leeway
