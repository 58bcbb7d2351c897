// The two number types that the CUDA kernels of this folder work on.
//
// All of them: pointers are to device memory, sizes are checked by the caller, work is queued on
// `stream` and nothing waits for it. A launch that fails throws std::runtime_error. Sums are
// float32 in an order that the shapes alone decide, so that the same call gives the same bits.
#pragma once

namespace leeway::cuda {

enum class Number { float32, bf16 };

}  // namespace leeway::cuda
