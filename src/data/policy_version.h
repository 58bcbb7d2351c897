// How old a policy is: the number of batches it was trained on.
#pragma once

#include <cstdint>

namespace leeway {

// The type of every version, of weights and of sampled tokens alike. -1: unknown, or not sampled.
using PolicyVersion = int32_t;

}  // namespace leeway
