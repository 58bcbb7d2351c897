// Where sampling in fp8 is tested: on the CPU, and on CUDA if the device has fp8.
#pragma once

#include <ATen/ATen.h>

#include <vector>

#ifdef LEEWAY_CUDA
#include <ATen/cuda/CUDAContext.h>
#endif

namespace leeway::testing {

inline std::vector<at::Device> fp8_devices() {
  std::vector<at::Device> list{at::kCPU};
#ifdef LEEWAY_CUDA
  if (!at::hasCUDA()) return list;
  const cudaDeviceProp* properties = at::cuda::getDeviceProperties(0);
  if (10 * properties->major + properties->minor >= 89) list.emplace_back(at::kCUDA, 0);
#endif
  return list;
}

}  // namespace leeway::testing
