// Products of few rows with a model's matrices, for GPUs of compute capability 9.0: what a decode
// step needs, where cuBLASLt without splitting the inputs has nothing good. The inputs of an
// element are summed in the order of cuBLASLt's kernels, so that results have the bits of
// products.h.
//
// The first part of the weights is on its way before the kernel before it in the stream is done:
// that one must not be what writes them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/products.h"

namespace leeway::cuda {

inline constexpr int64_t kMostFewRows = 256;

// Whether the two below take a product, and are the faster way for it: by its rows, sizes, types
// and alignment, and the device.
bool has_few_row_kernel(const Projection& projection);
bool has_gated_few_row_kernel(const Projection& projection);

// Products::project.
void project_few_rows(const Projection& projection, cudaStream_t stream);

// y [rows, outputs / 2] = silu(gate) * up, where gate and up are the halves of x weight^T, each
// rounded as `project` and `swiglu` would. No bias; y_stride is not used.
void project_few_rows_gated(const Projection& projection, cudaStream_t stream);

}  // namespace leeway::cuda
