#include "cuda/attention_tile.cuh"
#include "cuda/device_math.cuh"
#include "cuda/early_launch.cuh"
#include "cuda/low_rank.h"

namespace leeway::cuda {
namespace {

using Bf16 = __nv_bfloat16;

constexpr int kWarpRows = 16;

// A block of `inputs_kernel` has 16 kTiles rows of x and 64 rows of a. Its warps deal the inputs
// out among them, kShare at a time, so that few rows keep many warps busy; their sums are added in
// the warps' order, which is the same for any kTiles.
constexpr int kInputWarps = 16, kInputOutputs = 64, kShare = 32;
constexpr int kSumOutputs = 32;  // whose sums lie in shared memory at a time

// The eight numbers of a row that a lane has of a share, or zeros.
__device__ __forceinline__ uint4 eight_at(const Bf16* row, bool there) {
  return there ? *reinterpret_cast<const uint4*>(row) : make_uint4(0, 0, 0, 0);
}

template <int kTiles>
__global__ void __launch_bounds__(kInputWarps* kWarp) inputs_kernel(const LowRankInputs of) {
  wait_for_earlier_kernels();
  let_next_kernel_begin();
  __shared__ float partial[kInputWarps][kWarpRows][kSumOutputs];
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = threadIdx.x % kWarp;
  const int group = lane / 4, column = lane % 4;
  const int64_t first_row = int64_t{blockIdx.y} * kTiles * kWarpRows;
  const int64_t first = int64_t{blockIdx.x} * kInputOutputs;
  const auto* x = static_cast<const Bf16*>(of.x);
  const auto* a = static_cast<const Bf16*>(of.a);

  float sums[kTiles][kInputOutputs / 8][4] = {};
#pragma unroll(2 / kTiles)
  for (int64_t k = warp * kShare + 8 * column; k - 8 * column < of.inputs;
       k += kInputWarps * kShare) {
    // Which of the share's inputs a product takes for its k-th is of no account, if x and a agree:
    // a lane reads eight adjacent ones, and has four of them in each of two products.
    const bool inside = k < of.inputs;
    uint4 rows[kTiles][2];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int64_t row = first_row + t * kWarpRows + group + 8 * r;
        rows[t][r] = eight_at(x + row * of.x_stride + k, inside && row < of.rows);
      }
    }
#pragma unroll
    for (int n = 0; n < kInputOutputs / 8; ++n) {
      const int64_t output = first + 8 * n + group;
      const uint4 b = eight_at(a + output * of.inputs + k, inside && output < of.width);
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const uint32_t low[4] = {rows[t][0].x, rows[t][1].x, rows[t][0].y, rows[t][1].y};
        const uint32_t high[4] = {rows[t][0].z, rows[t][1].z, rows[t][0].w, rows[t][1].w};
        multiply_add(sums[t][n], low, b.x, b.y);
        multiply_add(sums[t][n], high, b.z, b.w);
      }
    }
  }
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int part = 0; part < kInputOutputs / kSumOutputs; ++part) {
      if (first + part * kSumOutputs >= of.width) break;
      __syncthreads();
#pragma unroll
      for (int n = 0; n < kSumOutputs / 8; ++n) {
        const float* sum = sums[t][part * kSumOutputs / 8 + n];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          partial[warp][group + i / 2 * 8][8 * n + 2 * column + i % 2] = sum[i];
        }
      }
      __syncthreads();
      const int row = static_cast<int>(threadIdx.x) / kSumOutputs;
      const int output = static_cast<int>(threadIdx.x) % kSumOutputs;
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < kInputWarps; ++w) sum += partial[w][row][output];
      const int64_t to_row = first_row + t * kWarpRows + row;
      const int64_t to = first + part * kSumOutputs + output;
      if (to_row < of.rows && to < of.width) {
        static_cast<Bf16*>(of.low)[to_row * of.width + to] = narrow<Bf16>(sum);
      }
    }
  }
}

constexpr int kThreads = 128, kTileOutputs = 64;
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
__global__ void __launch_bounds__(kThreads)
    low_rank_kernel(const __grid_constant__ LowRankUpdate update) {
  wait_for_earlier_kernels();
  let_next_kernel_begin();
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
  launch_early(low_rank_kernel, grid, kThreads, 0, stream, update);
  check_launch("a low-rank update");
}

void low_rank_inputs(const LowRankInputs& inputs, cudaStream_t stream) {
  if (inputs.rows == 0 || inputs.width == 0) return;
  const auto launch = [&](auto* kernel, int tiles) {
    const dim3 grid(blocks_for(inputs.width, kInputOutputs),
                    blocks_for(inputs.rows, int64_t{tiles} * kWarpRows));
    launch_early(kernel, grid, kInputWarps * kWarp, 0, stream, inputs);
  };
  // Many rows read a less often in larger tiles; few are on more multiprocessors in small ones.
  inputs.rows < 4096 ? launch(inputs_kernel<1>, 1) : launch(inputs_kernel<2>, 2);
  check_launch("inputs of a low-rank update");
}

}  // namespace leeway::cuda
