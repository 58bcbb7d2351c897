// Kernels that begin while the one before them in their stream still runs: what they do before
// `wait_for_earlier_kernels` overlaps with its end, and they are on the device when it is done.
#pragma once

#include <cuda_runtime.h>

namespace leeway::cuda {

// Results of earlier kernels of the stream are there when this returns, and nobody reads what this
// kernel overwrites. Every kernel that is launched early calls it before it touches either.
__device__ __forceinline__ void wait_for_earlier_kernels() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel of the stream, if it is launched early, may begin when all blocks have called
// this or ended.
__device__ __forceinline__ void let_next_kernel_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

template <class... Parameters, class... Arguments>
void launch_early(void (*kernel)(Parameters...), dim3 grid, int threads, size_t shared_bytes,
                  cudaStream_t stream, Arguments&&... arguments) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid, config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &early, config.numAttrs = 1;
  // A failed launch is reported by the caller's check_launch.
  static_cast<void>(
      cudaLaunchKernelEx(&config, kernel, Parameters(static_cast<Arguments&&>(arguments))...));
}

}  // namespace leeway::cuda
