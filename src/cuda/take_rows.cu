#include "cuda/take_rows.h"

#include "cuda/device_math.cuh"

namespace leeway::cuda {
namespace {

constexpr int kThreads = 256;

// One thread for 16 bytes; `parts` of them in a row.
__global__ void take_rows_kernel(const char* from, int64_t from_stride, const int32_t* rows,
                                 int64_t count, int64_t parts, char* to, int64_t to_stride) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= count * parts) return;
  const int64_t i = at / parts, byte = at % parts * 16;
  const int32_t row = rows[i];
  uint4 value = make_uint4(0, 0, 0, 0);
  if (row >= 0) value = *reinterpret_cast<const uint4*>(from + row * from_stride + byte);
  *reinterpret_cast<uint4*>(to + i * to_stride + byte) = value;
}

}  // namespace

void take_rows(const void* from, int64_t from_stride, const int32_t* rows, int64_t count,
               int64_t bytes, void* to, int64_t to_stride, cudaStream_t stream) {
  if (count == 0 || bytes == 0) return;
  const int64_t parts = bytes / 16;
  take_rows_kernel<<<blocks_for(count * parts, kThreads), kThreads, 0, stream>>>(
      static_cast<const char*>(from), from_stride, rows, count, parts, static_cast<char*>(to),
      to_stride);
  check_launch("take_rows");
}

}  // namespace leeway::cuda
