// The size of a block of the KV cache, on every device: the scheduler counts in it, and the
// attention kernels of the CPU and of CUDA read it.
#pragma once

#include <cstdint>

namespace leeway {

inline constexpr int64_t kBlockKeys = 16;  // positions

// Rows of one sequence in a tile of the attention kernels on a GPU, at most.
inline constexpr int64_t kAttentionTileRows = 128;

}  // namespace leeway
