// The values of GGUF tensors in float32, and float32 in the types that are written.
#pragma once

#include <cstddef>
#include <span>

#include "gguf/tensor_type.h"

namespace leeway {

// Whole blocks in, their elements out. Each value is what the formats define, computed in float32:
// products are exact, and the sum with a block's minimum is rounded once.
void dequantise(GgufType type, std::span<const std::byte> blocks, std::span<float> out);

// F32, F16, BF16 or Q8_0, rounded to the nearest (F16 and BF16: ties to even; Q8_0: ties away from
// zero). `out` has whole blocks for `values`. A value too large for the type becomes infinite.
void quantise(GgufType type, std::span<const float> values, std::span<std::byte> out);

}  // namespace leeway
