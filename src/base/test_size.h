// How large the cases of slow tests are.
#pragma once

#include <cstdlib>

namespace leeway::testing {

// Whether LEEWAY_SMALL_TESTS is set: tools that watch every access of a kernel are many times
// slower, and see in few rows what they see in many.
inline bool small_cases() { return std::getenv("LEEWAY_SMALL_TESTS") != nullptr; }

}  // namespace leeway::testing
