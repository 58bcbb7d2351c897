#include "cuda/attention_tile.cuh"
#include "cuda/device_math.cuh"
#include "cuda/low_rank.h"

namespace leeway::cuda {
namespace {

using Bf16 = __nv_bfloat16;

constexpr int kThreads = 128, kWarpRows = 16, kTileOutputs = 64;
constexpr int kTileRows = kThreads / kWarp * kWarpRows;
constexpr int kDepth = 16;  // of a product of tensor cores

// Two numbers of a row from `column` on; zeros beyond the rank and of a row that is not there.
__device__ __forceinline__ uint32_t pair_at(const Bf16* row, bool there, int64_t column,
                                            int64_t rank) {
  return there && column < rank ? *reinterpret_cast<const uint32_t*>(row + column) : 0u;
}

// A warp has 16 rows, a lane two of them: lane / 4 and 8 further, and 16 adjacent outputs of both.
// The columns of the eight products are dealt out for that: column n of product j is output 16 (n /
// 2) + 2 j + n % 2.
__global__ void __launch_bounds__(kThreads) low_rank_kernel(const LowRankUpdate update) {
  int tile = static_cast<int>(blockIdx.x), i = 0;
  for (; i + 1 < update.parts; ++i) {
    const int tiles = static_cast<int>((update.part[i].outputs + kTileOutputs - 1) / kTileOutputs);
    if (tile < tiles) break;
    tile -= tiles;
  }
  const LowRankPart part = update.part[i];
  const int64_t warp_row = static_cast<int64_t>(blockIdx.y) * kTileRows +
                           static_cast<int64_t>(threadIdx.x) / kWarp * kWarpRows;
  if (warp_row >= update.rows) return;
  const int lane = threadIdx.x % kWarp, group = lane / 4, column = lane % 4;
  const int64_t rank = update.rank, width = update.parts * rank;
  const int64_t rows[2] = {warp_row + group, warp_row + group + 8};
  const int64_t first = int64_t{tile} * kTileOutputs;
  const auto* low = static_cast<const Bf16*>(update.low) + i * rank;
  const auto* b = static_cast<const Bf16*>(part.b);

  float sums[8][4] = {};
  for (int64_t k = 0; k < rank; k += kDepth) {
    const int64_t at = k + 2 * column;
    uint32_t a[4];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool there = rows[r] < update.rows;
      a[r] = pair_at(low + rows[r] * width, there, at, rank);
      a[r + 2] = pair_at(low + rows[r] * width, there, at + 8, rank);
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int64_t output = first + 16 * (group / 2) + 2 * j + group % 2;
      const bool there = output < part.outputs;
      const Bf16* row = b + output * rank;
      multiply_add(sums[j], a, pair_at(row, there, at, rank), pair_at(row, there, at + 8, rank));
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t output = first + 16 * column + 8 * half;
      if (rows[r] >= update.rows || output >= part.outputs) continue;
      Bf16* y = static_cast<Bf16*>(update.y) + rows[r] * update.y_stride + part.first + output;
      Eight<Bf16> values = load_eight(y);
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const float sum = sums[4 * half + n / 2][2 * r + n % 2];
        values.values[n] = narrow<Bf16>(__fmaf_rn(update.scale, sum, wide(values.values[n])));
      }
      *reinterpret_cast<uint4*>(y) = *reinterpret_cast<const uint4*>(&values);
    }
  }
}

}  // namespace

void add_low_rank(const LowRankUpdate& update, cudaStream_t stream) {
  unsigned tiles = 0;
  for (int i = 0; i < update.parts; ++i) {
    tiles += blocks_for(update.part[i].outputs, kTileOutputs);
  }
  if (update.rows == 0 || tiles == 0) return;
  const dim3 grid(tiles, blocks_for(update.rows, kTileRows));
  low_rank_kernel<<<grid, kThreads, 0, stream>>>(update);
  check_launch("a low-rank update");
}

}  // namespace leeway::cuda
