// Tensors of a CUDA device as the kernels of src/cuda take them. Only where the build has CUDA.
#pragma once

#include <ATen/ATen.h>
#include <c10/cuda/CUDAStream.h>

#include "cuda/dtype.h"

namespace leeway {

inline cuda::Dtype dtype_of(const at::Tensor& x) {
  return x.scalar_type() == at::kBFloat16 ? cuda::Dtype::bf16 : cuda::Dtype::float32;
}
inline cudaStream_t stream_of(const at::Tensor& x) {
  return c10::cuda::getCurrentCUDAStream(x.device().index()).stream();
}
inline void* data_of(const at::Tensor& x) { return x.defined() ? x.data_ptr() : nullptr; }

}  // namespace leeway
