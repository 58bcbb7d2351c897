// Ranks that are threads of one process, for tests and simulations: each copies what it needs from
// the others' memory. Has the bits of ranks that are processes.
#pragma once

#include <memory>
#include <vector>

#include "ranks/ranks.h"

namespace leeway {

// One object per rank, each for a thread of its own. An object that is destroyed has left: those
// that wait for it, or would have to, throw Lost. Messages wait without a bound on their number.
std::vector<std::unique_ptr<Ranks>> make_local_ranks(int size);

}  // namespace leeway
