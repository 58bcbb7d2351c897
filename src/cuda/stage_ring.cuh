// The stages of a product in shared memory: one warp fills them with boxes of both matrices,
// warpgroups multiply what is there and hand it back. What includes this is compiled for sm_90a.
#pragma once

#include "cuda/box_copies.cuh"
#include "cuda/early_launch.cuh"

namespace leeway::cuda {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// In shared memory.
template <int kStages>
struct __align__(8) StageRing {
  uint64_t full_barriers[kStages], empty_barriers[kStages];

  __device__ __forceinline__ uint32_t full(int stage) { return address_of(&full_barriers[stage]); }
  __device__ __forceinline__ uint32_t empty(int stage) {
    return address_of(&empty_barriers[stage]);
  }
  // By all threads of a block, before anything else.
  __device__ __forceinline__ void make(int readers) {
    if (threadIdx.x == 0) {
      for (int stage = 0; stage < kStages; ++stage) {
        make_barrier(full(stage), 1);
        make_barrier(empty(stage), readers);
      }
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
  }
  // By one lane: calls queue_weight(step, stage) and queue_x(step, stage) for each step, in its
  // turn. Weights do not depend on the kernels before, so their first stages are on their way
  // earlier.
  template <class QueueWeight, class QueueX>
  __device__ __forceinline__ void fill(int steps, const QueueWeight& queue_weight,
                                       const QueueX& queue_x) {
    const int at_once = min(steps, kStages);
    for (int step = 0; step < at_once; ++step) queue_weight(step, step);
    wait_for_earlier_kernels();
    for (int step = 0; step < at_once; ++step) queue_x(step, step);
    for (int step = at_once; step < steps; ++step) {
      const int stage = step % kStages;
      wait_for(empty(stage), step / kStages % 2 ^ 1);
      queue_weight(step, stage);
      queue_x(step, stage);
    }
  }
};

#endif

}  // namespace leeway::cuda
