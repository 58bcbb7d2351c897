#include "cuda/finite.h"

#include <algorithm>

#include "cuda/device_math.cuh"

namespace leeway::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kAhead = 4;  // loads of 16 bytes that a thread has in flight

// Whether a word holds a number whose exponent is all ones.
template <class T>
__device__ __forceinline__ bool not_finite_in(uint32_t word) {
  if constexpr (sizeof(T) == sizeof(float)) {
    return (word & 0x7f800000u) == 0x7f800000u;
  } else {
    return (word & 0x7f800000u) == 0x7f800000u || (word & 0x7f80u) == 0x7f80u;
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    find_not_finite_kernel(const T* from, int64_t count, int32_t* not_finite) {
  constexpr int kPack = 16 / sizeof(T);
  const auto* source = reinterpret_cast<const uint4*>(from);
  const int64_t packs = count / kPack, threads = static_cast<int64_t>(gridDim.x) * kThreads;
  const int64_t own = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  bool bad = false;
  const auto look = [&](const uint4& pack) {
    for (const uint32_t word : {pack.x, pack.y, pack.z, pack.w}) {
      bad = bad || not_finite_in<T>(word);
    }
  };
  for (int64_t first = own; first < packs; first += kAhead * threads) {
    uint4 loaded[kAhead];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      if (first + a * threads < packs) loaded[a] = __ldcs(source + first + a * threads);
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      if (first + a * threads >= packs) break;
      look(loaded[a]);
    }
  }
  if (packs * kPack + own < count) {  // at most the first threads
    const T value = from[packs * kPack + own];
    bad = bad || !isfinite(wide(value));
  }
  if (__syncthreads_or(bad ? 1 : 0) != 0 && threadIdx.x == 0) *not_finite = 1;
}

}  // namespace

void find_not_finite(Dtype dtype, const void* from, int64_t count, int32_t* not_finite,
                     cudaStream_t stream) {
  check_cuda(cudaMemsetAsync(not_finite, 0, sizeof *not_finite, stream), "a flag");
  if (count == 0) return;
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    const unsigned blocks = std::min<unsigned>(blocks_for(count, kThreads),
                                               4 * static_cast<unsigned>(multiprocessors()));
    find_not_finite_kernel<T>
        <<<blocks, kThreads, 0, stream>>>(static_cast<const T*>(from), count, not_finite);
  });
  check_launch("find_not_finite");
}

}  // namespace leeway::cuda
