// A saved state that ranks load together: each reads its part of weights and moments from the
// files, or is given it by rank 0 where it does not see them.
#pragma once

#include <optional>
#include <string>

#include "ranks/ranks.h"
#include "trainer/state_shard.h"

namespace leeway {

// On all ranks at once; `folder` is rank 0's. Into `shard`: its weights are still to be handed to
// the other ranks. Returns the optimizer steps. Where something cannot be read nothing has changed:
// rank 0 throws Error, naming the file, and the others return nothing. Beside its shard a rank
// needs memory for another one.
std::optional<int64_t> load_sharded(Ranks& ranks, const std::string& folder, StateShard& shard);

}  // namespace leeway
