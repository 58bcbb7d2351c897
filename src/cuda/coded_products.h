// Products of e4m3 codes (base/e4m3.h) for GPUs of compute capability 9.0, of any number of rows.
// An element's inputs are summed 128 at a time by the tensor cores, whose sums have fewer bits than
// float32, and these in float32 in order. So an element has the same bits however many rows are
// computed with it, in blocks of whatever size.
//
// The first part of the weights is on its way before the kernel before it in the stream is done:
// that one must not be what writes them.
#pragma once

#include <cuda_runtime.h>

#include "cuda/products.h"

namespace leeway::cuda {

// Whether the next takes a product of codes: by its alignment, and the device.
bool has_coded_kernel(const Projection& projection);

// Products::project for one of codes.
void project_coded(const Projection& projection, cudaStream_t stream);

}  // namespace leeway::cuda
