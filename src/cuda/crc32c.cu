#include "cuda/crc32c.h"

#include "base/crc32c_lanes.h"
#include "cuda/device.h"

namespace leeway::cuda {
namespace {

using crc32c_lanes::kLanes;
using crc32c_lanes::kPartWords;

// A block per part. Times x^(32 kLanes) is four lookups: a product is the sum of those of the
// bytes.
__global__ void __launch_bounds__(kLanes)
    crc32c_parts_kernel(const uint32_t* words, int64_t count, uint32_t* parts) {
  __shared__ uint32_t table[4][256];
  __shared__ uint32_t sums[kLanes / 32];
  static_assert(kLanes == 256, "a thread per entry of a table");
  const int lane = static_cast<int>(threadIdx.x);
  const uint32_t shift = crc32c_lanes::shift_by(kLanes);
  for (int k = 0; k < 4; ++k) {
    table[k][lane] = crc32c_lanes::product(static_cast<uint32_t>(lane) << (8 * k), shift);
  }
  __syncthreads();
  const int64_t begin = count - static_cast<int64_t>(gridDim.x - blockIdx.x) * kPartWords;
  uint32_t sum = 0;
#pragma unroll 8
  for (int64_t at = begin + lane; at < begin + kPartWords; at += kLanes) {
    const uint32_t word = at < 0 ? 0u : words[at];
    sum = table[0][sum & 0xff] ^ table[1][(sum >> 8) & 0xff] ^ table[2][(sum >> 16) & 0xff] ^
          table[3][sum >> 24] ^ word;
  }
  sum = crc32c_lanes::product(sum, crc32c_lanes::shift_by(static_cast<uint64_t>(kLanes - lane)));
  sum = __reduce_xor_sync(0xffffffffu, sum);
  if (lane % 32 == 0) sums[lane / 32] = sum;
  __syncthreads();
  if (lane != 0) return;
  for (int k = 1; k < kLanes / 32; ++k) sum ^= sums[k];
  parts[blockIdx.x] = sum;
}

}  // namespace

void crc32c_parts(const void* data, int64_t words, uint32_t* parts, cudaStream_t stream) {
  const int64_t blocks = crc32c_lanes::parts_of(words);
  if (blocks == 0) return;
  crc32c_parts_kernel<<<static_cast<unsigned>(blocks), kLanes, 0, stream>>>(
      static_cast<const uint32_t*>(data), words, parts);
  check_launch("crc32c_parts");
}

}  // namespace leeway::cuda
