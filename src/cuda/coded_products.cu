// A block has 64 or 128 rows and kOutputs outputs. One warp queues copies of the next inputs, 128
// at a time, into a ring of stages; a warpgroup for each 64 rows multiplies what is there and adds
// the sums of a stage to those before it.

#include "cuda/coded_products.h"

#include <algorithm>

#include "cuda/coded_products.cuh"
#include "cuda/stage_ring.cuh"

namespace leeway::cuda {
namespace {

using Bf16 = __nv_bfloat16;

constexpr int kDepth = kBoxBytes;  // inputs of a stage
constexpr int kGroupRows = 64, kGroupThreads = 128;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

#define LEEWAY_FOUR(c, n) "+f"(c[n]), "+f"(c[n + 1]), "+f"(c[n + 2]), "+f"(c[n + 3])
#define LEEWAY_SIXTEEN(c, n) \
  LEEWAY_FOUR(c, n), LEEWAY_FOUR(c, n + 4), LEEWAY_FOUR(c, n + 8), LEEWAY_FOUR(c, n + 12)

// c [64, n] (+)= a [64, 32] b [n, 32]^T, in rows and columns as mma.m16n8k16 has them: a warp has
// 16 rows, a lane rows lane / 4 and 8 further, columns 8 i + 2 (lane % 4) and the next. With `keep`
// 0 c begins with nothing.
__device__ __forceinline__ void multiply_codes(float (&c)[16], uint64_t a, uint64_t b, int keep) {
  asm volatile(
      "{\n.reg .pred keep;\nsetp.ne.b32 keep, %18, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
      "%16, %17, keep, 1, 1;\n}"
      : LEEWAY_SIXTEEN(c, 0)
      : "l"(a), "l"(b), "r"(keep));
}
__device__ __forceinline__ void multiply_codes(float (&c)[32], uint64_t a, uint64_t b, int keep) {
  asm volatile(
      "{\n.reg .pred keep;\nsetp.ne.b32 keep, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "%32, %33, keep, 1, 1;\n}"
      : LEEWAY_SIXTEEN(c, 0), LEEWAY_SIXTEEN(c, 16)
      : "l"(a), "l"(b), "r"(keep));
}
__device__ __forceinline__ void multiply_codes(float (&c)[64], uint64_t a, uint64_t b, int keep) {
  asm volatile(
      "{\n.reg .pred keep;\nsetp.ne.b32 keep, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "%64, %65, keep, 1, 1;\n}"
      : LEEWAY_SIXTEEN(c, 0), LEEWAY_SIXTEEN(c, 16), LEEWAY_SIXTEEN(c, 32), LEEWAY_SIXTEEN(c, 48)
      : "l"(a), "l"(b), "r"(keep));
}

#undef LEEWAY_SIXTEEN
#undef LEEWAY_FOUR

#endif

// ---------------------------------------------------------------------------------------------

struct Product {
  int rows, inputs, outputs;
  const float *x_scales, *weight_scales;
  const Bf16* bias;
  Bf16* y;
  int64_t y_stride;
};

template <int kGroups, int kOutputs, int kStages>
__global__ void __launch_bounds__(kGroups* kGroupThreads + kWarp)
    coded_product_kernel(const __grid_constant__ CUtensorMap x,
                         const __grid_constant__ CUtensorMap weight, Product product) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // empty elsewhere: has_coded_kernel sees it
  constexpr int kRows = kGroups * kGroupRows;
  constexpr int kXBytes = kRows * kDepth, kStageBytes = kXBytes + kOutputs * kDepth;
  extern __shared__ char shared[];
  __shared__ StageRing<kStages> ring;
  const uint32_t stages = (address_of(shared) + 1023) / 1024 * 1024;
  // Blocks that run at the same time share weights: rows come first.
  const int first_row = static_cast<int>(blockIdx.x) * kRows;
  const int first_output = static_cast<int>(blockIdx.y) * kOutputs;
  const int steps = (product.inputs + kDepth - 1) / kDepth;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;

  ring.make(kGroups);
  let_next_kernel_begin();

  if (warp == kGroups * kGroupThreads / kWarp) {
    const auto queue_weight = [&](int step, int stage) {
      expect_bytes(ring.full(stage), kStageBytes);
      copy_box(stages + stage * kStageBytes + kXBytes, weight, step * kDepth, first_output,
               ring.full(stage));
    };
    const auto queue_x = [&](int step, int stage) {
      copy_box(stages + stage * kStageBytes, x, step * kDepth, first_row, ring.full(stage));
    };
    if (lane == 0) ring.fill(steps, queue_weight, queue_x);
  } else {
    wait_for_earlier_kernels();  // which write the scales
    const int group = warp * kWarp / kGroupThreads;
    float sums[kOutputs / 2], sums_of_stage[kOutputs / 2];
#pragma unroll
    for (int i = 0; i < kOutputs / 2; ++i) sums[i] = sums_of_stage[i] = 0.0f;
    for (int step = 0; step < steps; ++step) {
      const int stage = step % kStages;
      wait_for(ring.full(stage), step / kStages % 2);
      const uint32_t at = stages + stage * kStageBytes;
      const uint64_t a = matrix_at(at + group * kGroupRows * kDepth);
      const uint64_t b = matrix_at(at + kXBytes);
#pragma unroll
      for (float& sum : sums_of_stage) asm volatile("" : "+f"(sum)::"memory");
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int k = 0; k < kDepth / 32; ++k) {
        multiply_codes(sums_of_stage, a + 2 * k, b + 2 * k, k > 0);
      }
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      if (threadIdx.x % kGroupThreads == 0) arrive(ring.empty(stage));
#pragma unroll
      for (int i = 0; i < kOutputs / 2; ++i) {
        asm volatile("" : "+f"(sums_of_stage[i])::"memory");
        sums[i] = __fadd_rn(sums[i], sums_of_stage[i]);
      }
    }

#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first_row + warp * 16 + r * 8 + lane / 4;
      if (row >= product.rows) continue;
      const float row_scale = __ldcg(product.x_scales + row);
#pragma unroll
      for (int n = 0; n < kOutputs / 8; ++n) {
        const int output = first_output + n * 8 + lane % 4 * 2;
        if (output >= product.outputs) continue;
        const auto result = [&](int which) {
          const float scaled = scaled_product(sums[n * 4 + r * 2 + which], row_scale,
                                              product.weight_scales[output + which]);
          return with_bias(scaled, product.bias, output + which);
        };
        *reinterpret_cast<__nv_bfloat162*>(product.y + row * product.y_stride + output) =
            __floats2bfloat162_rn(result(0), result(1));
      }
    }
  }
#endif
}

// ---------------------------------------------------------------------------------------------
// Launches

CUtensorMap map_of(const void* codes, int64_t rows, int64_t inputs, int box_rows) {
  return box_map(CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, codes, rows, inputs, box_rows);
}

template <int kGroups, int kOutputs, int kStages>
void launch(const Projection& p, cudaStream_t stream) {
  constexpr int kRows = kGroups * kGroupRows;
  constexpr int kBytes = kStages * (kRows + kOutputs) * kDepth + 1024;
  auto* kernel = coded_product_kernel<kGroups, kOutputs, kStages>;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
             "products of codes, shared memory");
  Product product{};
  product.rows = static_cast<int>(p.rows), product.inputs = static_cast<int>(p.inputs);
  product.outputs = static_cast<int>(p.outputs);
  product.x_scales = p.x_scales, product.weight_scales = p.weight_scales;
  product.bias = static_cast<const Bf16*>(p.bias);
  product.y = static_cast<Bf16*>(p.y);
  product.y_stride = p.y_stride > 0 ? p.y_stride : p.outputs;
  const dim3 grid(blocks_for(p.rows, kRows), blocks_for(p.outputs, kOutputs));
  launch_early(kernel, grid, kGroups * kGroupThreads + kWarp, size_t{kBytes}, stream,
               map_of(p.x, p.rows, p.inputs, kRows),
               map_of(p.weight, p.outputs, p.inputs, kOutputs), product);
  check_launch("products of codes");
}

// Rows and outputs of a block whose inputs are read, times the number of times that all
// multiprocessors are filled with blocks: what a product takes per input.
int64_t cost_of(const Projection& p, int groups, int outputs) {
  const int64_t blocks = static_cast<int64_t>(blocks_for(p.outputs, outputs)) *
                         blocks_for(p.rows, groups * kGroupRows);
  const int64_t waves = (blocks + multiprocessors() - 1) / multiprocessors();
  return waves * (groups * kGroupRows + outputs);
}

bool aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

}  // namespace

bool has_coded_kernel(const Projection& p) {
  // The device has loaded code of sm_90a if the kernel has its barriers.
  static const bool loaded = [] {
    cudaFuncAttributes attributes{};
    const cudaError_t status = cudaFuncGetAttributes(&attributes, coded_product_kernel<1, 32, 8>);
    if (status != cudaSuccess) cudaGetLastError();  // no code for this device at all
    return status == cudaSuccess && attributes.sharedSizeBytes > 0;
  }();
  return loaded && p.y_type == Dtype::bf16 && p.y_stride % 2 == 0 && aligned(p.x) &&
         aligned(p.weight) && aligned(p.y);
}

// Of all blocks but the largest two fit onto a multiprocessor: while one waits for its products or
// adds them, the other multiplies.
void project_coded(const Projection& p, cudaStream_t stream) {
  if (p.rows == 0) return;
  const int64_t costs[] = {cost_of(p, 1, 32), cost_of(p, 1, 64), cost_of(p, 2, 64),
                           cost_of(p, 2, 128)};
  const int64_t least = *std::min_element(std::begin(costs), std::end(costs));
  if (costs[0] == least) {
    launch<1, 32, 8>(p, stream);
  } else if (costs[1] == least) {
    launch<1, 64, 6>(p, stream);
  } else if (costs[2] == least) {
    launch<2, 64, 4>(p, stream);
  } else {
    launch<2, 128, 6>(p, stream);
  }
}

}  // namespace leeway::cuda
