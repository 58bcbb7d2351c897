// Attention of tiles by the products of warpgroups, which GPUs of compute capability 9.0 have. The
// bits are those of attention.h's text.
#pragma once

#include "cuda/attention.h"

namespace leeway::cuda {

// attend_tiles, or false if this device or these sizes have no such kernel, or if there is too
// little to compute for it. `scale` is log2(e) over the root of the head's dimensions.
bool attend_tiles_by_warpgroups(const Attention& attention, const AttentionTile* tiles,
                                int64_t count, float scale, cudaStream_t stream);

}  // namespace leeway::cuda
