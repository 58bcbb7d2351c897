#include "cuda/join_floats.h"

#include "cuda/device_math.cuh"
#include "cuda/split_float.h"

namespace leeway::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kEach = 4;  // numbers of a thread

// `aligned`: each array to the bytes of kEach of its numbers.
__global__ void __launch_bounds__(kThreads)
    join_floats_kernel(const uint16_t* high, const int16_t* low, int64_t count, bool aligned,
                       float* full) {
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kEach;
  if (aligned && i + kEach <= count) {
    const ushort4 h = *reinterpret_cast<const ushort4*>(high + i);
    const short4 l = *reinterpret_cast<const short4*>(low + i);
    const auto joined = [](uint16_t a, int16_t b) { return __uint_as_float(joined_bits({a, b})); };
    *reinterpret_cast<float4*>(full + i) =
        make_float4(joined(h.x, l.x), joined(h.y, l.y), joined(h.z, l.z), joined(h.w, l.w));
    return;
  }
  for (int64_t k = i; k < min(i + kEach, count); ++k) {
    full[k] = __uint_as_float(joined_bits({high[k], low[k]}));
  }
}

}  // namespace

void join_floats(const void* high, const int16_t* low, int64_t count, float* full,
                 cudaStream_t stream) {
  if (count == 0) return;
  const bool aligned = reinterpret_cast<uintptr_t>(high) % 8 == 0 &&
                       reinterpret_cast<uintptr_t>(low) % 8 == 0 &&
                       reinterpret_cast<uintptr_t>(full) % 16 == 0;
  join_floats_kernel<<<blocks_for(count, int64_t{kThreads} * kEach), kThreads, 0, stream>>>(
      static_cast<const uint16_t*>(high), low, count, aligned, full);
  check_launch("join_floats");
}

}  // namespace leeway::cuda
