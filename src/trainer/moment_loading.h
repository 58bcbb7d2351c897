// A saved state that ranks load together: each reads its part of the moments from the files, or is
// given it by rank 0 where it does not see them.
#pragma once

#include <optional>
#include <string>

#include "model/parameters.h"
#include "ranks/ranks.h"
#include "trainer/moment_shard.h"

namespace leeway {

// On all ranks at once; `folder` is rank 0's. Moments into `shard`, weights into `policy`, with
// `leads_alone` of rank 0 alone; returns the optimizer steps. Where something cannot be read
// nothing has changed: rank 0 throws Error, naming the file, and the others return nothing. Beside
// its shard a rank needs memory for another one, and for the weights.
std::optional<int64_t> load_sharded(Ranks& ranks, const std::string& folder, MomentShard& shard,
                                    Parameters& policy, bool leads_alone = false);

}  // namespace leeway
