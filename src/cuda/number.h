// The two number types of the CUDA kernels in this folder.
//
// For all of them: pointers are to device memory, sizes are checked by the caller, work is queued
// on `stream` without waiting. A failed launch throws std::runtime_error. Sums are float32 in an
// order that depends only on the shapes, so that the same call gives the same bits.
#pragma once

namespace leeway::cuda {

enum class Number { float32, bf16 };

}  // namespace leeway::cuda
