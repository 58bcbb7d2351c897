// The batch that commands use when the user has none at hand.
#pragma once

#include <cstdint>

#include "leeway/loss.h"

namespace leeway {

// A made-up batch with the traits of a stale, quantised rollout: group-centred advantages, prompt
// tokens masked, small numeric noise on every token, drift that grows with the policy's age, and a
// few tokens far off. The same seed gives the same batch everywhere. All streams are present.
Batch example_batch(int sequences, int mean_length, uint64_t seed);

}  // namespace leeway
