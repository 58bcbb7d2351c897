// pack_heads and store_heads (norm_rope_swiglu.h) with several heads in a warp side by side: the
// same bits in half the time, for head dimensions that are a power of two.
#pragma once

#include "cuda/norm_rope_swiglu.h"

namespace leeway::cuda {

// 16 to 128.
bool packs_side_by_side(int64_t head_dim);
void pack_heads_side_by_side(Dtype dtype, const PackedHeads& step, cudaStream_t stream);
void store_heads_side_by_side(Dtype dtype, const HeadStep& step, cudaStream_t stream);

}  // namespace leeway::cuda
